"""Weights stored in 4 bits an element are unpacked in one launch: NF4 and FP4, as bitsandbytes stores them.

With q_i the 4 bits of element i (two in a byte, the first one in the higher half) and b = i // blocksize,

    w_i = code[q_i] scale_b
    scale_b = absmax_b                                                        once quantised
    scale_b = code2[absmax_b] absmax2[b // blocksize2] + offset               doubly quantised: absmax_b has 8 bits

Every product and the sum is rounded to float32 by itself, and w_i to its dtype at the end: the bits are those of
``bitsandbytes.functional.dequantize_4bit``. Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized
LLMs", section 3.

Memory traffic for n elements of e bytes: n (e + 1/2) bytes, and for the scales of blocks of 64 elements n / 64 bytes
(4 n / 64 once quantised). Three flops an element at most, so a launch is bound by memory. bitsandbytes unpacks the
scales before, in two more launches.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from slothplug.kernels.backend import primitives_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class QuantState(Protocol):
    """What is read of ``bitsandbytes.functional.QuantState``."""

    shape: torch.Size
    dtype: torch.dtype
    blocksize: int
    absmax: Tensor
    code: Tensor
    nested: bool
    state2: Any
    offset: Tensor


class Primitives(Protocol):
    """See ``kernels.triton.four_bit.TritonPrimitives``."""

    @staticmethod
    def dequantize(stored: Tensor, state: QuantState, out: Tensor) -> None:
        """Writes the weight into a contiguous ``out``."""


def dequantize_4bit(stored: Tensor, state: QuantState, *, out: Tensor | None = None) -> Tensor:
    """Returns the weight, on the device of ``stored``; Triton computes it on the current stream.

    Args:
        stored: ``ceil(n / 2)`` bytes in any shape and dtype.
        state: how they were quantised; ``blocksize`` is a power of two from 32 to 4096.
        out: a contiguous tensor of ``state.shape`` and ``state.dtype`` to write into; a new one by default.

    Not differentiable.

    Raises:
        TypeError: ``state.dtype`` is not float32, bfloat16 or float16.
        ValueError: ``out`` is another tensor than described.
    """
    if out is None:
        out = torch.empty(state.shape, dtype=state.dtype, device=stored.device)
    elif out.shape != state.shape or out.dtype is not state.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {tuple(state.shape)} of {state.dtype}; it is {tuple(out.shape)} of {out.dtype}, "
            f"strides {out.stride()}"
        )
    if state.dtype not in DTYPES:
        raise TypeError(f"4-bit weights are unpacked to float32, bfloat16 or float16, not to {state.dtype}")
    _primitives().dequantize(stored, state, out)
    return out


def _primitives() -> type[Primitives]:
    return primitives_on("triton", Primitives, "four_bit")
