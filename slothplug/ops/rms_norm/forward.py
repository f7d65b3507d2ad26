"""The fast forward of a norm, and what it may take for granted between two changes of the module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.rms_norm import DTYPES
from slothplug.ops.rms_norm.recognition import PROVED_NDIMS, Norm, number
from slothplug.patching.forward_context import facts_of
from slothplug.patching.predicates import OTHER_ARGUMENTS, plain, why_not_input
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now
from slothplug.patching.watch import UNWATCHED, Reads, Watch

_CHANGED = Refusal("the norm's attributes, or what its forward reads elsewhere, were changed after the patch")


class NormFacts(NamedTuple):
    """What a call reads from a norm: the weight, [H] or None, and eps."""

    weight: torch.Tensor | None
    eps: float


def fast_norm(module: nn.Module, served: Served, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the norm's forward."""
    norm: Norm = served.spec
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    x = args[0]
    facts = facts_of(served)
    if facts is None:
        facts = read_norm(module, norm)
    if isinstance(facts, Refusal):
        return served.fall_back(module, facts, x)
    weight, eps = facts
    if refusal := _why_not(norm, x, weight, served.device_type):
        return served.fall_back(module, refusal, x)
    return served.calls.serve(served.kernel(x, weight, eps, offset=norm.style.offset, casting=norm.style.casting))


def bind(module: nn.Module, served: Served, watch: Watch) -> NormFacts | Refusal:
    """The weight and eps that calls use until one of them is replaced, converted or moved."""
    return read_norm(module, served.spec, watch)


def read_norm(module: nn.Module, norm: Norm, reads: Reads = UNWATCHED) -> NormFacts | Refusal:
    """The weight and eps of a norm; a refusal where the kernel cannot take them."""
    if not norm.settled.fits(module, reads):
        return _CHANGED
    own = module.__dict__
    eps = number(reads.get(own, norm.eps)) if isinstance(norm.eps, str) else norm.eps
    if eps is None:
        return Refusal(f"its {norm.eps} is no number any more")
    if norm.weight is None:
        return NormFacts(None, eps)
    # A plain attribute in the replicas of nn.DataParallel.
    weight = reads.get(own["_parameters"], norm.weight)
    if weight is None:
        weight = reads.get(own, norm.weight)
    if not plain(weight):
        return Refusal(f"its weight is a {type(weight).__name__}")
    return NormFacts(reads.tensor(weight), eps)


def _why_not(norm: Norm, x: torch.Tensor, weight: torch.Tensor | None, device_type: str) -> Refusal | None:
    if refusal := why_not_now() or why_not_input(x, device_type):
        return refusal
    weight_dtype = None if weight is None else weight.dtype
    if (x.dtype, weight_dtype, torch.is_autocast_enabled(device_type)) not in norm.proved:
        known = x.dtype in DTYPES and (weight is None or weight.dtype in DTYPES)
        return Refusal(f"input of {x.dtype}, weight of {weight_dtype}" + (": stock rounds otherwise" if known else ""))
    if x.ndim not in PROVED_NDIMS:
        return Refusal(f"input of {x.ndim} dimensions")
    if weight is not None and (weight.numel() != x.shape[-1] or weight.device != x.device):
        return Refusal("weight is sharded or elsewhere")
    return None
