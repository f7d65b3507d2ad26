"""Whether somebody records or transforms the calls that are running, so that only stock operations are understood."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def why_recorded() -> str | None:
    """Why no kernel may be called now, whatever its tensors are; None where one may.

    Kernels are opaque to a tracer, and have a rule for reverse mode only: no batching, no tangents. A compiler never
    comes here: it is given the stock forward (``private_class.with_forward``).
    """
    if torch._C._get_tracing_state() is not None:
        return "traced by torch.jit"
    if torch._C._are_functorch_transforms_active():
        return "transformed by torch.func"
    if forward_ad._current_level >= 0:
        return "inside a forward-mode derivative"
    return None
