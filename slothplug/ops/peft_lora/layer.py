"""PEFT's LoRA layer: whether it is of the kind that can be served, and what a call reads from it in the plain case."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.kernels.lora import Operand, Packed
from slothplug.ops.peft_lora import four_bit
from slothplug.ops.peft_lora.four_bit import is_four_bit, packed_weight, peft_class, why_not_packed
from slothplug.patching.predicates import dtype_of, hooked, why_not_touchable
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Refusal

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_WEIGHTS = _PLAIN | {Packed}
_DROPOUTS = frozenset({nn.Identity, nn.Dropout})


def peft_layers() -> Any:
    """PEFT's module of LoRA layers, or None where nobody has imported it: then no model has such a layer."""
    return sys.modules.get("peft.tuners.lora.layer")


def refusal_of(module: Any, linear: type[nn.Module], four_bit_too: bool = True) -> Refusal | None:
    """Why a LoRA layer cannot be served in any state that it may come into later. ``linear`` is PEFT's plain one."""
    base = module.base_layer
    packed = four_bit_too and is_four_bit(base)
    if not packed and stock_class(base) is not nn.Linear:
        served = "nn.Linear and bitsandbytes' 4-bit layers are" if four_bit_too else "nn.Linear is"
        return Refusal(f"its base layer is a {type(base).__name__}; only {served} fused", excused=True)
    if packed and (refusal := why_not_packed(base)):
        return refusal
    if packed and stock_class(module) is linear:
        return Refusal("PEFT's plain layer on a 4-bit base layer: PEFT was not told that the model is_loaded_in_4bit")
    if stock_class(module) is not (peft_class() if packed else linear):
        return Refusal(f"a {stock_class(module).__name__} of {stock_class(module).__module__}", excused=True)
    if module.fan_in_fan_out or getattr(module, "is_target_conv_1d_layer", False):
        return Refusal("its weight is stored transposed (fan_in_fan_out)", excused=True)
    name = probed_adapter(module)
    if name is None:
        variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        if variants:
            return Refusal(f"its adapter is no plain LoRA ({', '.join(variants)})", excused=True)
        return Refusal("it has no adapter")
    parts = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(parts[0]) is not nn.Linear or type(parts[1]) is not nn.Linear or type(parts[2]) not in _DROPOUTS:
        return Refusal(f"its adapter is made of {', '.join(type(part).__name__ for part in parts)}")
    for part in (base, *parts):
        if refusal := why_not_touchable(part, (type(base._parameters["weight"]),) if packed and part is base else ()):
            return refusal.within(f"{type(part).__name__} in it")
    return None


def probed_adapter(module: Any) -> str | None:
    """The adapter that stands for the layer at patch time: an active one if possible, and never a variant."""
    names = [name for name in (*module.active_adapters, *module.lora_A) if name in module.lora_A]
    return next((name for name in names if name not in module.lora_variant), None)


def key_of(module: Any) -> Hashable:
    """All that decides what a twin of ``module`` computes."""
    name = probed_adapter(module)
    dropout = module.lora_dropout[name]
    return (
        stock_class(module),
        module.base_layer.bias is None,
        module.lora_B[name].bias is None,
        getattr(dropout, "p", 0.0),
        module.scaling[name],
        four_bit.key_of(module.base_layer) if is_four_bit(module.base_layer) else dtype_of(module.base_layer),
        module.lora_A[name].weight.dtype,
    )


class Adapted(NamedTuple):
    """What a call reads from a LoRA layer in the plain case."""

    operand: Operand
    dropout: nn.Module | None
    """The dropout to be called, or None where it does nothing."""
    factors: tuple[nn.Module, nn.Module]
    """The layers that hold A and B."""


def adapted(module: nn.Module, hooks_on_itself: bool = False) -> Adapted | Refusal:
    """The parts of a LoRA layer in the plain case, or why this is not the plain case.

    With ``hooks_on_itself``, the plain case may have hooks around the layer's forward, though not on its parts.

    Reads ``__dict__`` and ``_modules`` directly: attribute look-ups of nn.Module would cost more than all the rest.
    """
    own = module.__dict__
    if own["_disable_adapters"]:
        return Refusal("adapters are disabled")
    if own["merged_adapters"]:
        return Refusal("the adapter is merged")
    modules = own["_modules"]
    firsts = modules["lora_A"]._modules
    name = own["_active_adapter"]
    if type(name) is not str:
        names = [each for each in name if each in firsts]
        if len(names) != 1:
            return Refusal("no adapter is active" if not names else "several adapters are active")
        name = names[0]
    elif name not in firsts:
        return Refusal("no adapter is active")
    if name in own["lora_variant"]:
        return Refusal(f"the adapter is no plain LoRA ({type(own['lora_variant'][name]).__name__})")
    base, first = modules["base_layer"], firsts[name]
    second, dropout = modules["lora_B"]._modules[name], modules["lora_dropout"]._modules[name]
    if type(first) is not nn.Linear or type(second) is not nn.Linear:
        return Refusal("a part of it is not an nn.Linear")
    # An output layer that was patched before PEFT wrapped it is one still.
    packed = type(base) is not nn.Linear and is_four_bit(base)
    if type(base) is not nn.Linear and stock_class(base) is not nn.Linear and not packed:
        return Refusal("a part of it is not an nn.Linear")
    if torch_module._has_any_global_hook():
        return Refusal("hooks on every module are set")
    if (not hooks_on_itself and hooked(module)) or hooked(base) or hooked(first) or hooked(second):
        return Refusal("it or a part of it has hooks, or a forward set by somebody else")
    active_dropout = None
    if type(dropout) is nn.Dropout:
        if dropout.__dict__["training"] and dropout.__dict__["p"] > 0:
            active_dropout = dropout
    elif type(dropout) is not nn.Identity:
        return Refusal(f"its dropout is a {type(dropout).__name__}")
    if active_dropout is None and hooked(dropout):
        return Refusal("its dropout has hooks")
    if not own.get("cast_input_dtype_enabled", True):
        return Refusal("casting of the adapter's input is switched off")
    weight = packed_weight(base) if packed else base._parameters.get("weight")
    if isinstance(weight, Refusal):
        return weight
    return _operand(weight, base, first, second, own["scaling"][name], active_dropout)


def _operand(
    weight: Any, base: nn.Module, first: nn.Module, second: nn.Module, scaling: object, dropout: nn.Module | None
) -> Adapted | Refusal:
    base_parameters, second_parameters = base._parameters, second._parameters
    a: Any = first._parameters.get("weight")
    b: Any = second_parameters.get("weight")
    bias, b_bias = base_parameters.get("bias"), second_parameters.get("bias")
    if type(weight) not in _WEIGHTS or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return Refusal("its weights are sharded, quantised or elsewhere")
    if (bias is not None and type(bias) not in _PLAIN) or (b_bias is not None and type(b_bias) not in _PLAIN):
        return Refusal("its biases are sharded, quantised or elsewhere")
    if first._parameters.get("bias") is not None:
        return Refusal("the adapter's first layer has a bias")
    if not isinstance(scaling, (float, int)):
        return Refusal(f"its scaling is a {type(scaling).__name__}")
    return Adapted(Operand(weight, bias, a, b, scaling, b_bias), dropout, (first, second))
