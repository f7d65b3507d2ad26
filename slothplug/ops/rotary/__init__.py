"""Rotary embedding sites: modules whose forward calls a function of its module that rotates by the tables cos and sin.

The function is recognised by its signature and its numbers, and exchanged in a copy of the forward's closure chain
(``patching.rebind_globals``); no module global is changed. Only ``forward`` and its decorators are searched: rotary
functions that other methods or functions call are not exchanged.

The bytecode of the forward shows that it calls the function. A layer without positions (every fourth one of Cohere 2)
does not reach the call; its site counts no served calls.

A kernel that a plugin offers for the operation ``rotary`` is called as ``kernels.rotary.rotary``, without ``backend``:

    kernel(q, k, cos, sin, *, pairing, output, table, rotate_last, promote) -> (q rotated, k rotated)

with q [B, Hq, T, D], k [B, Hk, T, D] or None, cos and sin [B or 1, T, R or R/2], of any strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.rotary import DTYPES, rotary
from slothplug.ops.rotary.forward import Exchange, bind, exchange_functions, fast_rotary
from slothplug.ops.rotary.probe import prove
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "rotary"


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME,
            "Rotary position embedding of q and k in one pass, forward and backward",
            competitors=("liger_kernel.transformers.rope",),
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    return Kernel.on_backend(NAME, rotary, device, settings)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    # Not kept from patch to patch: a rebuilt forward holds its module's globals as they are now.
    exchanged: dict[type[nn.Module], Exchange | Refusal] = {}
    for name, module in model.named_modules():
        owner = stock_class(module)
        if owner not in exchanged:
            exchanged[owner] = exchange_functions(owner)
        outcome = exchanged[owner]
        if isinstance(outcome, Refusal):
            if outcome.reason:
                yield Left(NAME, name, module, outcome._replace(excused=_is_latent_attention(module)))
            continue
        device, dtype = device_of(module), dtype_of(module)
        kernel = kernel_for(NAME, device, dtype, settings)
        if device.type == "meta":
            yield Left(NAME, name, module, Refusal("its weights are on the meta device"))
        elif kernel is None:
            yield Left(NAME, name, module, Refusal(f"no kernel for {device.type} and {dtype}"))
        else:
            proof = partial(prove, outcome, kernel, device, dtype)
            functions = tuple(function for function, _ in outcome.functions)
            yield Site(NAME, name, module, fast_rotary, outcome, kernel, proof, (functions, dtype), bind)


def _is_latent_attention(module: nn.Module) -> bool:
    return hasattr(module, "kv_lora_rank")
