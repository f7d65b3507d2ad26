"""Transforms and recorders that are active around a call, under which only stock operations are understood."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from slothplug.patching.sites import Refusal

_TRACED = Refusal("traced by torch.jit")
_TRANSFORMED = Refusal("transformed by torch.func")
_FORWARD_MODE = Refusal("inside a forward-mode derivative")


def why_not_now() -> Refusal | None:
    """Why no kernel may be called now, whatever its tensors are; None where one may.

    A tracer cannot look into a kernel, and a kernel has a rule for reverse mode only: no batching, no tangents. A
    compiler never comes here: it is given the stock forward (``private_class.with_forward``).
    """
    if torch._C._get_tracing_state() is not None:
        return _TRACED
    if torch._C._are_functorch_transforms_active():
        return _TRANSFORMED
    if forward_ad._current_level >= 0:
        return _FORWARD_MODE
    return None
