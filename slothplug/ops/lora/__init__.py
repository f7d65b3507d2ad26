"""LoRA sites: PEFT's ``lora.Linear`` on an ``nn.Linear``; siblings that share an input run in one autograd node.

What decides a call's result is asked on every call, since PEFT and its users change it between calls: the active
adapters, ``disable_adapter``, merging, scaling, hooks, the types of all parts. Whatever is not the plain case is
answered by the original forward, and the report counts why.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.lora import DTYPES, lora_linear
from slothplug.ops.lora.cast_factors import Casts
from slothplug.ops.lora.forward import fast_lora
from slothplug.ops.lora.probe import prove
from slothplug.ops.lora.siblings import groups_in
from slothplug.ops.peft_lora.layer import key_of, peft_layers, refusal_of
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.private_class import is_patched
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "lora"


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [Operation(NAME, "LoRA linear layers, those that share an input together, in one autograd node", Casts)]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The same code on every device: the work is matrix products, which the vendor's library does."""
    if operation != NAME or dtype not in DTYPES:
        return None
    name = NAME if settings.lora_precision == "peft" else f"{NAME}, adapters cast to the input's dtype"
    return Kernel(name, "torch", partial(lora_linear, precision=settings.lora_precision))


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
        yield Site(
            NAME,
            name,
            module,
            fast_lora,
            members.get(module),
            kernel,
            partial(prove, module, kernel, settings.lora_precision),
            key_of(module),
        )
