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

from slothplug.kernels.lora import DTYPES, Dequantize, Packed
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import UNWATCHED, Reads

PEFT_LAYER = "peft.tuners.lora.bnb"

REPACKED = Refusal(
    "bitsandbytes has repacked its weight for evaluation on this CPU; model.state_dict() restores the format"
)
_REPACKS = Refusal("an evaluation without gradients, for which bitsandbytes repacks the weight on this CPU")
_FEW_TOKENS = Refusal("few tokens without gradients, for which bitsandbytes has kernels that do not unpack the weight")

# On GPUs bitsandbytes multiplies few rows by a packed weight and unpacks it for more. Where it changes over depends on
# shape and GPU: 0.50's own table (backends/cuda/ops.py) says 64 rows for the larger weights on an H200.
_FEW_ROWS = 64


def is_four_bit(base: nn.Module) -> bool:
    """True if ``base`` is one of bitsandbytes' own 4-bit linear layers."""
    library = sys.modules.get("bitsandbytes")
    if library is None:
        return False
    return stock_class(base) in (library.nn.Linear4bit, library.nn.LinearNF4, library.nn.LinearFP4)


def peft_class() -> type[nn.Module] | None:
    """PEFT's LoRA layer for 4-bit base layers, or None if PEFT has not imported it."""
    return getattr(sys.modules.get(PEFT_LAYER), "Linear4bit", None)


def why_not_packed(base: Any, reads: Reads = UNWATCHED) -> Refusal | None:
    """Why the base layer's weight cannot be multiplied by here."""
    weight = reads.get(base._parameters, "weight")
    library = sys.modules["bitsandbytes"]
    if type(weight) is not library.nn.Params4bit:
        return Refusal("its weights are sharded or elsewhere")
    state = reads.get(weight.__dict__, "quant_state")
    if state is None:
        return Refusal("its weight is not quantised yet")
    own = state.__dict__
    reads.items((own, own), ("shape", "dtype"))
    if reads.get(own, "packing_format_for_cpu", False):
        return REPACKED
    # dequantize_4bit transposes a weight of one row; bitsandbytes' own forward reshapes that weight first.
    if weight.shape[0] == 1 or len(state.shape) != 2:
        return Refusal("its weight is packed in another format")
    return None


def why_not_call(base: Any, x: torch.Tensor) -> Refusal | None:
    """Why bitsandbytes would not answer a call of ``base`` with ``x`` by a product with the dequantised weight.

    On CPUs with AVX512-BF16, an evaluation without gradients repacks the weight in place, rounds its block scales to
    bfloat16 and multiplies in bfloat16. A weight that is repacked stays so until it is saved, and has no gradient then.
    """
    if base._parameters["weight"].quant_state.__dict__.get("packing_format_for_cpu"):
        return REPACKED
    if x.device.type == "cpu":
        evaluates = not base.training and not x.requires_grad
        return _REPACKS if evaluates and base.__dict__.get("support_avx512bf16_for_cpu") else None
    few = not torch.is_grad_enabled() and x.numel() <= _FEW_ROWS * x.shape[-1]
    return _FEW_TOKENS if few and x.device.type == "cuda" else None


def why_not_now(base: Any, reads: Reads = UNWATCHED) -> Refusal | None:
    """Why the base layer's weight cannot be multiplied by in this call.

    bitsandbytes' own forward chooses ``compute_dtype`` and the bias's dtype in its first call.
    """
    if refusal := why_not_packed(base, reads):
        return refusal
    own = base.__dict__
    if not reads.item(own, "compute_type_is_set") or reads.item(own, "compute_dtype") not in DTYPES:
        return Refusal("its base layer has not chosen compute_dtype yet")
    bias = reads.get(base._parameters, "bias")
    if bias is not None and bias.dtype is not base.compute_dtype:
        return Refusal(f"its bias is {bias.dtype} still, and its base layer computes in {base.compute_dtype}")
    return None


def packed(base: Any, dequantize: Dequantize | None = None) -> Packed:
    """How the kernel multiplies by the base layer's weight; by default with bitsandbytes' own function."""
    return Packed(base._parameters["weight"].quant_state, dequantize or bitsandbytes_dequantize())


def bitsandbytes_dequantize() -> Dequantize:
    """``dequantize_4bit(stored, state)``."""
    function: Dequantize = sys.modules["bitsandbytes"].functional.dequantize_4bit
    return function


def computes_in(base: Any) -> torch.dtype:
    """``compute_dtype``; float32 stands for one that bitsandbytes' first call chooses."""
    dtype: torch.dtype | None = base.compute_dtype
    return dtype or torch.float32


def why_not_dtypes(
    x: torch.dtype, compute: torch.dtype, dequantized: torch.dtype, autocast: torch.dtype | None
) -> Refusal | None:
    """Why an input of dtype ``x`` is not multiplied here as bitsandbytes does.

    Its product is subject to autocast. If two 16-bit dtypes meet, it rounds to one after the other.

    Args:
        compute: the layer's ``compute_dtype``.
        dequantized: the dtype that the weight had before it was quantised.
    """
    product = compute if autocast is None else autocast
    if not {x, compute} <= {product, torch.float32} and not (autocast is None and compute is torch.float32):
        return Refusal(f"input of {x}, base layer that computes in {compute}, autocast in {autocast}")
    if is_coarser(dequantized, product):
        # It unpacks to compute_dtype for the forward since 0.50, and to the weight's former dtype for the backward.
        return Refusal(f"its weight was {dequantized}, and its base layer computes in {product}")
    return None


def is_coarser(dtype: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(other).eps


def key_of(base: Any) -> Hashable:
    """Everything that decides what a twin of ``base`` computes."""
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
