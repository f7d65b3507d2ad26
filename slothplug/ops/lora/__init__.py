"""LoRA sites: PEFT's ``lora.Linear`` on an ``nn.Linear`` or a 4-bit layer; siblings run in one autograd node.

What decides a call's result is asked again whenever it may have changed (``ops.lora.facts``): the active adapters,
``disable_adapter``, merging, scaling, hooks, the types of all parts. A call that is not the plain case is answered by
the original forward, and the report counts why.

A kernel that a plugin offers for the operation ``lora`` has the signature of ``kernels.lora.lora_linear``. One for
``dequantize_4bit`` is called as

    dequantize(stored, state)       stored: the data of bitsandbytes' ``Params4bit``     -> [O, K]
                                    state: its ``bitsandbytes.functional.QuantState``

and returns a new tensor of ``state.shape`` and ``state.dtype`` on the device of ``stored``. Autograd does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.backend import choose_backend, why_not_triton
from slothplug.kernels.four_bit import dequantize_4bit
from slothplug.kernels.lora import DTYPES, Dequantize, lora_linear
from slothplug.ops.lora.cast_factors import CastFactors
from slothplug.ops.lora.facts import LoraSpec, bind
from slothplug.ops.lora.forward import fast_lora
from slothplug.ops.lora.probe import prove
from slothplug.ops.lora.siblings import groups_in
from slothplug.ops.peft_lora.four_bit import bitsandbytes_dequantize, is_four_bit
from slothplug.ops.peft_lora.layer import key_of, peft_layers, refusal_of
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.private_class import is_patched, stock_class
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME, DEQUANTIZE = "lora", "dequantize_4bit"


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(NAME, "LoRA linear layers, those that share an input together, in one autograd node", CastFactors)
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """LoRA is the same code on every device: the work is matrix products, which the vendor's library does."""
    if operation == DEQUANTIZE:
        backend = choose_backend(device) if settings.backend == "auto" else settings.backend
        if backend == "triton" and not why_not_triton(device):
            return Kernel(DEQUANTIZE, backend, dequantize_4bit)
        return Kernel("bitsandbytes", "bitsandbytes", bitsandbytes_dequantize())
    if operation != NAME or dtype not in DTYPES:
        return None
    name = NAME if settings.lora_precision == "peft" else f"{NAME}, adapters cast to the input's dtype"
    return Kernel(name, "torch", lora_linear)


@hookimpl(trylast=True)  # of an output head with an adapter, ``head`` serves the loss as well
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    layers = peft_layers()
    if layers is None:
        return
    servable: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, layers.LoraLayer):
            continue
        if refusal := refusal_of(module, layers.Linear):
            yield Left(NAME, name, module, refusal)
        else:
            servable[name] = module
    # A group's members are patched together: one that an earlier patch serves keeps the group that it has.
    members = groups_in({name: module for name, module in servable.items() if not is_patched(module)}, model)
    for name, module in servable.items():
        device, dtype = device_of(module), dtype_of(module)
        kernel = kernel_for(NAME, device, dtype, settings)
        if kernel is None:
            yield Left(NAME, name, module, Refusal(f"no kernel for {device.type} and {dtype}"))
            continue
        dequantize = _dequantize_for(module, device, settings)
        if isinstance(dequantize, Refusal):
            yield Left(NAME, name, module, dequantize)
            continue
        spec = LoraSpec(stock_class(module).forward, members.get(module), dequantize)
        proof = partial(prove, module, spec, kernel, settings)
        yield Site(NAME, name, module, fast_lora, spec, kernel, proof, (key_of(module), dequantize), bind)


def _dequantize_for(module: nn.Module, device: torch.device, settings: Settings) -> Dequantize | Refusal | None:
    """The kernel that dequantises the layer's base weight; None if that is not a 4-bit weight."""
    base: Any = module.base_layer
    if not is_four_bit(base):
        return None
    dtype = base.weight.quant_state.dtype
    kernel = kernel_for(DEQUANTIZE, device, dtype, settings)
    return (
        Refusal(f"no kernel dequantises 4-bit weights to {dtype} on {device.type}")
        if kernel is None
        else kernel.function
    )
