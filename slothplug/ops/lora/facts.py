"""What a LoRA layer's call may take for granted: decided once, and again when something that it depends on changes.

Within an outermost call the facts stand for its length (``patching.eligibility``). Outside, and in a recompute, each
call reads and settles anew. What may change inside a call is asked by every call: whether adapters are enabled and
merged, which adapter is active, whether dropout is active, and autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.lora import Dequantize
from slothplug.ops.lora.dtypes import LayerDtypes
from slothplug.ops.lora.siblings import Member
from slothplug.ops.peft_lora.layer import LoraParts, read_active, read_lora
from slothplug.patching.forward_context import facts_of
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import Watch


class LoraSpec(NamedTuple):
    """What the finder learnt about a LoRA layer.

    Attributes:
        forward: its class's when it was found.
        member: its place among its siblings; None if it has none.
        dequantize: the kernel for 4-bit weights; None if the base layer has another kind of weight.
    """

    forward: Callable[..., Any]
    member: Member | None = None
    dequantize: Dequantize | None = None


class LoraFacts(NamedTuple):
    """The plain case of one LoRA layer.

    Attributes:
        parts: what a call multiplies by.
        active: the layer's ``_active_adapter`` from which they were read, compared by identity.
        device: of all weights.
        size_in: K.
        dtypes: of the weights.
    """

    parts: LoraParts
    active: object
    device: torch.device
    size_in: int
    dtypes: LayerDtypes


_REPLACED = Refusal("its class's forward was replaced after the patch")


def read_now(module: nn.Module, served: Served[LoraSpec, Any]) -> LoraFacts | LoraParts | Refusal:
    """What a call that begins now multiplies by: the facts if they are bound, else the parts, to be settled."""
    facts = facts_of(served)
    if type(facts) is LoraFacts:
        own = module.__dict__
        if facts.active is own["_active_adapter"] and not own["_disable_adapters"] and not own["merged_adapters"]:
            return facts
    if stock_class(module).forward is not served.spec.forward:
        return _REPLACED
    return read_lora(module, dequantize=served.spec.dequantize)


def settle(module: nn.Module, parts: LoraParts) -> LoraFacts | Refusal:
    """The facts that follow from a layer's ``parts``."""
    weight, a, b = parts.operand.weight, parts.operand.a, parts.operand.b
    device = weight.device
    if device != a.device or device != b.device:
        return Refusal(f"weights on {device}, {a.device} and {b.device}")
    shape = weight.shape if parts.compute_dtype is None else parts.operand.base.state.shape  # type: ignore[attr-defined]
    if len(shape) != 2 or a.shape[-1] != shape[1]:
        return Refusal("its weights are partitioned, or do not fit each other")
    return LoraFacts(parts, module.__dict__["_active_adapter"], device, shape[1], LayerDtypes.of(parts))


def bind(module: nn.Module, served: Served[LoraSpec, Any], watch: Watch) -> LoraFacts | Refusal:
    """The facts for the calls to come, whether adapters are enabled and merged now or not."""
    for base in stock_class(module).__mro__:
        if not watch.absent(vars(base), "forward"):
            break
    if stock_class(module).forward is not served.spec.forward:
        return _REPLACED
    parts = read_active(module, watch, dequantize=served.spec.dequantize)
    return parts if isinstance(parts, Refusal) else settle(module, parts)
