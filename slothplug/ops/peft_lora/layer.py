"""PEFT's LoRA layer: whether it is of the kind that can be served, and what a call reads from it in the plain case.

The plain case is one active adapter that is plain LoRA and not merged, on a base layer without hooks. PEFT and its
users change all of that between calls.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.kernels.lora import DENSE, BaseWeight, Dequantize, Operand
from slothplug.ops.peft_lora import four_bit
from slothplug.ops.peft_lora.four_bit import is_four_bit, peft_class, why_not_packed
from slothplug.patching.predicates import dtype_of, why_not_touchable
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import UNWATCHED, Reads

Precision = Literal["peft", "compute"]
"""The setting ``lora_precision``: adapters multiply in PEFT's dtypes, or in their input's."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_BIASES = _PLAIN | {type(None)}
_DROPOUTS = frozenset({nn.Identity, nn.Dropout})


def peft_layers() -> Any:
    """PEFT's module of LoRA layers, or None if it is not imported: then no model has such a layer."""
    return sys.modules.get("peft.tuners.lora.layer")


def refusal_of(module: Any, linear: type[nn.Module], four_bit_too: bool = True) -> Refusal | None:
    """Why a LoRA layer cannot be served, whatever its state in a later call. ``linear`` is PEFT's plain class."""
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
    """The adapter that is probed at patch time: an active one if there is one, and never a variant."""
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


class LoraParts(NamedTuple):
    """What a call reads from a LoRA layer in the plain case.

    Attributes:
        operand: weights, biases, scaling.
        dropout: the ``nn.Dropout`` in front of A, or None. It may be inactive; see ``active_dropout``.
        compute_dtype: a 4-bit base layer's own; None for an ``nn.Linear``.
    """

    operand: Operand
    dropout: nn.Module | None
    compute_dtype: torch.dtype | None


def read_lora(
    module: nn.Module, hooks_on_itself: bool = False, dequantize: Dequantize | None = None
) -> LoraParts | Refusal:
    """The parts of a LoRA layer in the plain case, or why this is not the plain case.

    Args:
        module: PEFT's layer, of a class that ``refusal_of`` accepts.
        hooks_on_itself: True if the plain case may have hooks around the layer's forward, though not on its parts.
        dequantize: the kernel for 4-bit weights; bitsandbytes' own by default.
    """
    if refusal := why_not_in_this_mode(module.__dict__):
        return refusal
    return read_active(module, UNWATCHED, hooks_on_itself, dequantize)


def why_not_in_this_mode(own: dict[str, Any]) -> Refusal | None:
    """Why a layer whose ``__dict__`` is ``own`` does not add its adapter's output."""
    if own["_disable_adapters"]:
        return _DISABLED
    return _MERGED if own["merged_adapters"] else None


_DISABLED, _MERGED = Refusal("adapters are disabled"), Refusal("the adapter is merged")
_NO_ADAPTER = Refusal("no adapter is active")


def active_dropout(dropout: nn.Module | None) -> nn.Module | None:
    """``dropout`` if it changes its input now."""
    if dropout is None:
        return None
    own = dropout.__dict__
    return dropout if own["training"] and own["p"] > 0 else None


def read_active(
    module: nn.Module, reads: Reads, hooks_on_itself: bool = False, dequantize: Dequantize | None = None
) -> LoraParts | Refusal:
    """As ``read_lora``, whether adapters are enabled and merged or not.

    Reads ``__dict__`` and ``_modules`` directly, as all functions below do: attribute look-ups of nn.Module would cost
    more than all the rest.
    """
    own = module.__dict__
    modules = own["_modules"]
    name = _active_adapter(own, reads)
    if isinstance(name, Refusal):
        return name
    variants = reads.item(own, "lora_variant")
    if not reads.absent(variants, name):
        return Refusal(f"the adapter is no plain LoRA ({type(variants[name]).__name__})")
    base: nn.Module = reads.item(modules, "base_layer")
    first: nn.Module = reads.item(reads.item(modules, "lora_A")._modules, name)
    second: nn.Module = reads.item(reads.item(modules, "lora_B")._modules, name)
    dropout: nn.Module = reads.item(reads.item(modules, "lora_dropout")._modules, name)
    if torch_module._has_any_global_hook():
        return Refusal("hooks on every module are set")
    if not hooks_on_itself and not reads.unhooked(module):
        return _HOOKED
    if not (reads.unhooked(base) and reads.unhooked(first) and reads.unhooked(second)):
        return _HOOKED
    if type(first) is not nn.Linear or type(second) is not nn.Linear:
        return _NO_LINEAR
    if type(dropout) not in _DROPOUTS:
        return Refusal(f"its dropout is a {type(dropout).__name__}")
    if not reads.unhooked(dropout):
        return Refusal("its dropout has hooks")
    if not reads.get(own, "cast_input_dtype_enabled", True):
        return Refusal("casting of the adapter's input is switched off")
    base_weight: BaseWeight = DENSE
    compute_dtype = None
    if not _is_linear(base):
        if not is_four_bit(base):
            return _NO_LINEAR
        if refusal := four_bit.why_not_now(base, reads):
            return refusal
        base_weight, compute_dtype = four_bit.packed(base, dequantize), four_bit.computes_in(base)
    operand = _operand(base_weight, base, first, second, reads.item(reads.item(own, "scaling"), name), reads)
    if isinstance(operand, Refusal):
        return operand
    return LoraParts(operand, dropout if type(dropout) is nn.Dropout else None, compute_dtype)


_HOOKED = Refusal("it or a part of it has hooks, or a forward set by somebody else")
_NO_LINEAR = Refusal("a part of it is not an nn.Linear")


def _active_adapter(own: dict[str, Any], reads: Reads) -> str | Refusal:
    """The name of the only adapter that is active in a layer whose ``__dict__`` is ``own``."""
    present, active = own["_modules"]["lora_A"]._modules, reads.item(own, "_active_adapter")
    reads.size(present)
    if type(active) is str:
        return active if active in present else _NO_ADAPTER
    reads.content(active, list(active))
    names = [name for name in active if name in present]
    if len(names) > 1:
        return Refusal("several adapters are active")
    return names[0] if names else _NO_ADAPTER


def _is_linear(base: nn.Module) -> bool:
    # An output layer that was patched before PEFT wrapped it has a private class.
    return type(base) is nn.Linear or stock_class(base) is nn.Linear


def _operand(
    base_weight: BaseWeight, base: nn.Module, first: nn.Module, second: nn.Module, scaling: object, reads: Reads
) -> Operand | Refusal:
    weight, bias = _parameter(base, "weight", reads), _parameter(base, "bias", reads)
    a, a_bias = _parameter(first, "weight", reads), _parameter(first, "bias", reads)
    b, b_bias = _parameter(second, "weight", reads), _parameter(second, "bias", reads)
    if (base_weight is DENSE and type(weight) not in _PLAIN) or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return Refusal("its weights are sharded, quantised or elsewhere")
    if type(bias) not in _BIASES or type(b_bias) not in _BIASES:
        return Refusal("its biases are sharded, quantised or elsewhere")
    if a_bias is not None:
        return Refusal("the adapter's first layer has a bias")
    if not isinstance(scaling, (float, int)):
        return Refusal(f"its scaling is a {type(scaling).__name__}")
    return Operand(weight, bias, a, b, scaling, b_bias, base_weight)


def _parameter(module: nn.Module, name: str, reads: Reads) -> Any:
    parameter = reads.get(module.__dict__["_parameters"], name)
    return None if parameter is None else reads.tensor(parameter)
