"""bitsandbytes' 4-bit linear layers as base layers of LoRA: QLoRA.

Such a layer casts its input to ``compute_dtype``, multiplies by the weight that it unpacks, and casts back. PEFT's
layer around it differs from the plain one in one more point: under autocast it leaves the input's dtype to autocast.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from slothplug.kernels.lora import DTYPES, Packed
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Refusal

PEFT_LAYER = "peft.tuners.lora.bnb"


def is_four_bit(base: nn.Module) -> bool:
    """Whether ``base`` is one of bitsandbytes' own 4-bit linear layers."""
    library = sys.modules.get("bitsandbytes")
    if library is None:
        return False
    return stock_class(base) in (library.nn.Linear4bit, library.nn.LinearNF4, library.nn.LinearFP4)


def peft_class() -> type[nn.Module] | None:
    """PEFT's LoRA layer for 4-bit base layers, where PEFT has loaded it."""
    return getattr(sys.modules.get(PEFT_LAYER), "Linear4bit", None)


def why_not_packed(base: Any) -> str | None:
    """Why the base layer's weight cannot be multiplied by here, as it is now."""
    weight = base._parameters.get("weight")
    library = sys.modules["bitsandbytes"]
    if type(weight) is not library.nn.Params4bit:
        return "its weights are sharded or elsewhere"
    state = weight.quant_state
    if state is None:
        return "its weight is not quantised yet"
    if not base.compute_type_is_set:
        return "its base layer has not chosen compute_dtype yet"  # the first call of bitsandbytes' forward does
    if base.compute_dtype not in DTYPES:
        return f"its base layer computes in {base.compute_dtype}"
    if torch.finfo(state.dtype).eps > torch.finfo(base.compute_dtype).eps:
        # bitsandbytes unpacks to compute_dtype for the forward since 0.50, and to the other dtype for the backward.
        return f"its weight was {state.dtype}, and its base layer computes in {base.compute_dtype}"
    if len(state.shape) != 2 or getattr(state, "packing_format_for_cpu", False):
        return "its weight is packed in another format"
    bias = base._parameters.get("bias")
    if bias is not None and bias.dtype is not base.compute_dtype:
        return f"its bias is {bias.dtype}, and its base layer computes in {base.compute_dtype}"
    return None


def packed_weight(base: Any) -> Packed | Refusal:
    """The base layer's weight as the kernel takes it."""
    if reason := why_not_packed(base):
        return Refusal(reason)
    weight = base._parameters["weight"]
    return Packed(
        weight, weight.quant_state, sys.modules["bitsandbytes"].functional.dequantize_4bit, base.compute_dtype
    )


def key_of(base: Any) -> Hashable:
    """All that decides what a twin of ``base`` computes."""
    weight = base.weight
    return base.compute_dtype, weight.quant_type, weight.compress_statistics, weight.quant_state.dtype


def small_base(base: Any, size_in: int, size_out: int, bias: bool, dtype: torch.dtype) -> nn.Module:
    """A random layer of the class and configuration of ``base`` that computes in ``dtype``, quantised."""
    weight, device = base.weight, base.weight.device
    unpacks_to = weight.quant_state.dtype if dtype is base.compute_dtype else dtype
    double = sys.modules["bitsandbytes"].nn.Linear4bit(
        size_in,
        size_out,
        bias=bias,
        compute_dtype=dtype,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    double = double.to(unpacks_to).to(device)
    double.compute_type_is_set = True
    if bias:
        double.bias = nn.Parameter(double.bias.detach().to(dtype))
    return double
