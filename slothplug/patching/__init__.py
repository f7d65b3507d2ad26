"""Model-facing half: find sites by structure, prove them, bind fast forwards, report, undo. Knows no Triton."""
