"""The probe of a norm: the kernel against twins of the module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from slothplug.ops.rms_norm.recognition import Norm, eps_of, probe_widths
from slothplug.patching.predicates import dtype_of
from slothplug.patching.proof import PROBE_RMS, difference, probe_rows
from slothplug.patching.sites import Kernel, Refusal
from slothplug.patching.twin import twin


def prove(module: nn.Module, norm: Norm, kernel: Kernel, device: torch.device) -> Refusal | None:
    """Compares output and gradients of the kernel with those of twins, in float32 and in the module's own dtype."""
    own = dtype_of(module)
    if (own, own if norm.weight else None, False) not in norm.proved:
        return Refusal(f"rounds otherwise in {own}")
    for dtype in dict.fromkeys((torch.float32, own)):
        double = twin(module, dtype)
        weight = double._parameters[norm.weight] if norm.weight else None
        fast: Callable[[torch.Tensor], torch.Tensor] = partial(
            kernel.function,
            weight=weight,
            eps=eps_of(norm.eps, vars(double)),
            offset=norm.style.offset,
            casting=norm.style.casting,
        )
        x = probe_rows(probe_widths(module)[-1], dtype, device)
        if refusal := difference(fast, double, [x], [] if weight is None else [weight]):
            return refusal.within(f"in {dtype}, rows of rms {PROBE_RMS}")
    return None
