"""The output head: where only the loss reads the logits, they are never held whole (``ops.head.lazy_logits``).

The operation ``head`` is linear + cross-entropy. A kernel that a plugin offers for it has the signature of
``kernels.linear_cross_entropy.linear_cross_entropy`` without ``backend``.

A head with a LoRA adapter of PEFT is served too (``ops.head.adapter``); the operation ``lora`` then leaves it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.ops.head.adapter import is_lora
from slothplug.ops.head.forward import HeadSpec, fast_head
from slothplug.ops.head.label_count import LabelCounts
from slothplug.ops.head.probe import prove
from slothplug.ops.head.recognition import output_heads, trl_computes_the_loss, why_not_head
from slothplug.ops.head.statistics_policy import record_statistics
from slothplug.ops.peft_lora.layer import key_of
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

__all__ = ["record_statistics", "trl_computes_the_loss"]

NAME = "head"
_COMPETITORS = ("liger_kernel.transformers.model", "cut_cross_entropy")


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME, "Output head and cross-entropy in chunks, without holding the logits", LabelCounts, _COMPETITORS
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME:
        return None
    return Kernel.on_backend("linear_cross_entropy", linear_cross_entropy, device, settings)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    names = {module: name for name, module in model.named_modules()}
    for head in output_heads(model):
        if refusal := why_not_head(head, model, settings):
            yield Left(NAME, names[head], head, refusal)
        elif (kernel := kernel_for(NAME, device_of(head), dtype_of(head), settings)) is None:
            yield Left(NAME, names[head], head, Refusal(f"no kernel for {device_of(head).type} and {dtype_of(head)}"))
        else:
            spec = HeadSpec(settings.loss_chunk_mib * 2**20, settings.lora_precision)
            key: Hashable = (getattr(head, "bias", None) is not None, dtype_of(head))
            proof = partial(prove, head, kernel, settings.lora_precision)
            if is_lora(head):
                key = key_of(head)
                if settings.lora_precision == "compute":
                    kernel = replace(kernel, name=f"{kernel.name}, adapter cast to the input's dtype")
            yield Site(NAME, names[head], head, fast_head, spec, kernel, proof, key)
