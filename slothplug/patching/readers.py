"""Who reads each token's entropy or most likely word after the loss, as TRL's trainers do; learnt from call to call.

Both come from the softmax that the loss computes anyway. So where a head's logits were read in this way, its next loss
writes them down, and the reader gets them without logits. A loss whose notes nobody read is the last that takes any.
"""

from __future__ import annotations

import torch

from slothplug.kernels.cross_entropy import RowStatistics


class Readers:
    """The readers of one head."""

    def __init__(self) -> None:
        self._expected = self._unread = False

    def expect(self, rows: int, device: torch.device) -> RowStatistics | None:
        """Room for what a loss of ``rows`` rows is to write down for them; None where nobody is expected."""
        self._unread = self._expected = self._expected and not self._unread
        return RowStatistics.empty(rows, device) if self._expected else None

    def note(self) -> None:
        """Somebody reads."""
        self._expected, self._unread = True, False
