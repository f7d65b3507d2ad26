"""What a LoRA layer's call may take for granted: decided once, and again when something that it depends on changes.

Within an outermost call the facts stand for its length (``patching.eligibility``). Outside, and in a recompute, each
call settles them anew. What may change inside a call is asked by every call: whether adapters are enabled and merged,
which adapter is active, whether dropout is active, and autocast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.lora import Dequantize, Dtypes
from slothplug.ops.lora.dtypes import Autocast, dtypes_of_call
from slothplug.ops.lora.siblings import Member
from slothplug.ops.peft_lora.four_bit import watch_four_bit
from slothplug.ops.peft_lora.layer import (
    LoraParts,
    Precision,
    active_adapter,
    parts_of_adapter,
    why_not_in_this_mode,
)
from slothplug.patching.eligibility import Watch
from slothplug.patching.forward_context import facts_of
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal


class LoraSpec(NamedTuple):
    """What the finder learnt about a LoRA layer.

    Attributes:
        member: its place among its siblings; None if it has none.
        dequantize: the kernel for 4-bit weights; None if the base layer has another kind of weight.
    """

    member: Member | None = None
    dequantize: Dequantize | None = None


class LoraFacts(NamedTuple):
    """The plain case of one LoRA layer.

    Attributes:
        parts: what a call multiplies by.
        active: the layer's ``_active_adapter`` from which they were read, compared by identity.
        device: of all weights.
        size_in: K.
        dtypes: answers of ``dtypes_of_call`` by its arguments that vary.
    """

    parts: LoraParts
    active: object
    device: torch.device
    size_in: int
    dtypes: dict[tuple[torch.dtype, Autocast], Dtypes | Refusal]

    def dtypes_for(self, x: torch.dtype, autocast: Autocast, precision: Precision) -> Dtypes | Refusal:
        key = x, autocast
        found = self.dtypes.get(key)
        if found is None:
            found = self.dtypes[key] = dtypes_of_call(x, self.parts, autocast, precision)
        return found


def facts_now(module: nn.Module, served: Served[LoraSpec, Any]) -> LoraFacts | Refusal:
    """The facts for a call that begins now."""
    own = module.__dict__
    if refusal := why_not_in_this_mode(own):
        return refusal
    facts = facts_of(served)
    if type(facts) is LoraFacts and facts.active is own["_active_adapter"]:
        return facts
    return _settle(module, served.spec)


def bind(module: nn.Module, served: Served[LoraSpec, Any], watch: Watch) -> LoraFacts | Refusal:
    """The facts for the calls to come, whether adapters are enabled and merged now or not."""
    _watch(module, watch)
    return _settle(module, served.spec)


def _settle(module: nn.Module, spec: LoraSpec) -> LoraFacts | Refusal:
    name = active_adapter(module)
    if isinstance(name, Refusal):
        return name
    parts = parts_of_adapter(module, name, dequantize=spec.dequantize)
    if isinstance(parts, Refusal):
        return parts
    weight, a, b = parts.operand.weight, parts.operand.a, parts.operand.b
    if not weight.device == a.device == b.device:
        return Refusal(f"weights on {weight.device}, {a.device} and {b.device}")
    size_in = weight.shape[1] if parts.compute_dtype is None else parts.operand.base.state.shape[1]  # type: ignore[attr-defined]
    if weight.ndim != 2 or a.shape[-1] != size_in:
        return Refusal("its weights are partitioned, or do not fit each other")
    return LoraFacts(parts, module.__dict__["_active_adapter"], weight.device, size_in, {})


def _watch(module: nn.Module, watch: Watch) -> None:
    """Notes all that ``_settle`` reads."""
    own: dict[str, Any] = module.__dict__
    active, modules = watch.item(own, "_active_adapter"), module._modules
    if type(active) is not str:
        watch.size(active)
    watch.size(modules["lora_A"]._modules)  # type: ignore[union-attr]
    name = active_adapter(module)
    if isinstance(name, Refusal) or not watch.absent(watch.item(own, "lora_variant"), name):
        return
    if not watch.absent(own, "cast_input_dtype_enabled"):
        watch.item(own, "cast_input_dtype_enabled")
    watch.item(watch.item(own, "scaling"), name)
    base: Any = watch.item(modules, "base_layer")
    parts = [base, *(watch.item(watch.item(modules, kind)._modules, name) for kind in _ADAPTER)]
    for part in parts:
        watch.type_of(part)
        watch.unhooked(part)
        for key in part._parameters:
            parameter = watch.item(part._parameters, key)
            if parameter is not None:
                watch.tensor(parameter)
    watch.unhooked(module)
    watch_four_bit(base, watch)


_ADAPTER = ("lora_A", "lora_B", "lora_dropout")
