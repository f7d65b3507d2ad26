"""RMSNorm sites: leaf modules with at most one weight vector whose forward is one of the known RMS normalisations.

A kernel that a plugin offers for the operation ``rms_norm`` is called as ``kernels.rms_norm.rms_norm``, without
``backend``:

    kernel(x, weight, eps, *, offset, casting)        x: [..., H], weight: [H] or None    -> [..., H]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.rms_norm import DTYPES, rms_norm
from slothplug.ops.rms_norm.forward import bind, fast_norm
from slothplug.ops.rms_norm.probe import prove
from slothplug.ops.rms_norm.recognition import Norm, identify, is_gated, key_of, why_not_candidate
from slothplug.patching.predicates import device_of, dtype_of, why_not_touchable
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "rms_norm"


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME,
            "RMS normalisation in one pass over the rows, forward and backward",
            competitors=("liger_kernel.transformers.rms_norm",),
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    return Kernel.on_backend(NAME, rms_norm, device, settings)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    identified: dict[Hashable, Norm | Refusal] = {}
    for name, module in model.named_modules():
        if is_gated(module):
            yield Left(NAME, name, module, Refusal("a gated norm", excused=True))
            continue
        named = "rmsnorm" in stock_class(module).__name__.lower()
        found = _site(name, module, model, settings, identified, named)
        if isinstance(found, Refusal):
            if named:
                yield Left(NAME, name, module, found)
        else:
            yield found


def _site(
    name: str,
    module: nn.Module,
    model: nn.Module,
    settings: Settings,
    identified: dict[Hashable, Norm | Refusal],
    named: bool,
) -> Site | Left | Refusal:
    """A refusal where nothing but its name speaks for the module's being a norm; ``Left`` for a norm that is left."""
    if refusal := why_not_candidate(module):
        return refusal
    device, dtype = device_of(module, model), dtype_of(module)
    untouchable = why_not_touchable(module)
    if untouchable and (named or device.type == "meta"):
        return untouchable
    key = key_of(module)
    if key not in identified:
        identified[key] = identify(module)
    norm = identified[key]
    if isinstance(norm, Refusal):
        return norm
    kernel = kernel_for(NAME, device, dtype, settings)
    if untouchable:
        return Left(NAME, name, module, untouchable)
    if kernel is None:
        return Left(NAME, name, module, Refusal(f"no kernel for {device.type} and {dtype}"))
    proof = partial(prove, module, norm, kernel, device)
    return Site(NAME, name, module, fast_norm, norm, kernel, proof, (key, norm.style, norm.eps, dtype), bind)
