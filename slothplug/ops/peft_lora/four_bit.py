"""bitsandbytes' 4-bit linear layers as base layers of LoRA: QLoRA.

Such a layer casts its input to ``compute_dtype``, multiplies by the weight that it unpacks, and casts back. PEFT's
layer around it differs from the plain one in one more point: under CUDA's autocast it leaves dtypes to autocast.
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


def why_not_packed(base: Any) -> Refusal | None:
    """Why the base layer's weight cannot be multiplied by here."""
    weight = base._parameters.get("weight")
    library = sys.modules["bitsandbytes"]
    if type(weight) is not library.nn.Params4bit:
        return Refusal("its weights are sharded or elsewhere")
    state = weight.quant_state
    if state is None:
        return Refusal("its weight is not quantised yet")
    if getattr(state, "packing_format_for_cpu", False):
        return Refusal(
            "bitsandbytes has repacked its weight for evaluation on this CPU; model.state_dict() restores the format"
        )
    # dequantize_4bit transposes a weight of one row; bitsandbytes' own forward reshapes that weight first.
    if weight.shape[0] == 1 or len(state.shape) != 2:
        return Refusal("its weight is packed in another format")
    return None


def repacks(base: Any, x: torch.Tensor) -> bool:
    """Whether bitsandbytes' forward of ``base`` on ``x`` multiplies by a repacked weight.

    On CPUs with AVX512-BF16, an evaluation without gradients repacks the weight in place, rounds its block scales to
    bfloat16 and multiplies in bfloat16. The result is that of another product than the one by the unpacked weight.
    """
    return (
        x.device.type == "cpu"
        and not base.training
        and not x.requires_grad
        and base.__dict__.get("support_avx512bf16_for_cpu", False)
    )


def packed_weight(base: Any) -> Packed | Refusal:
    """The base layer's weight as the kernel takes it now.

    bitsandbytes' own forward settles ``compute_dtype`` and the bias's dtype when it is called first.
    """
    if refusal := why_not_packed(base):
        return refusal
    if not base.compute_type_is_set or base.compute_dtype not in DTYPES:
        return Refusal("its base layer has not chosen compute_dtype yet")
    bias = base._parameters.get("bias")
    if bias is not None and bias.dtype is not base.compute_dtype:
        return Refusal(f"its bias is {bias.dtype} still, and its base layer computes in {base.compute_dtype}")
    weight = base._parameters["weight"]
    return Packed(
        weight, weight.quant_state, sys.modules["bitsandbytes"].functional.dequantize_4bit, base.compute_dtype
    )


def computes_in(base: Any) -> torch.dtype:
    """``compute_dtype``; float32 stands for one that bitsandbytes' first call chooses."""
    dtype: torch.dtype | None = base.compute_dtype
    return dtype or torch.float32


def why_not_dtypes(x: torch.dtype, weight: Packed, autocast: torch.dtype | None) -> Refusal | None:
    """Why an input of dtype ``x`` is not multiplied here as bitsandbytes does.

    Its product is subject to autocast. Where two 16-bit dtypes meet, it rounds to one after the other.
    """
    product = weight.dtype if autocast is None else autocast
    if not {x, weight.dtype} <= {product, torch.float32} and not (autocast is None and weight.dtype is torch.float32):
        return Refusal(f"input of {x}, base layer that computes in {weight.dtype}, autocast in {autocast}")
    if is_coarser(weight.state.dtype, product):
        # It unpacks to compute_dtype for the forward since 0.50, and to the weight's former dtype for the backward.
        return Refusal(f"its weight was {weight.state.dtype}, and its base layer computes in {product}")
    return None


def is_coarser(dtype: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(other).eps


def key_of(base: Any) -> Hashable:
    """All that decides what a twin of ``base`` computes."""
    weight = base.weight
    return base.compute_dtype, weight.quant_type, weight.compress_statistics, weight.quant_state.dtype


def small_base(base: Any, size_in: int, size_out: int, bias: bool, dtype: torch.dtype) -> nn.Module:
    """A random layer of the quantisation of ``base`` that computes in ``dtype``, quantised."""
    weight, device = base.weight, base.weight.device
    own = dtype is computes_in(base) and not is_coarser(weight.quant_state.dtype, dtype)
    unpacks_to = weight.quant_state.dtype if own else dtype
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
