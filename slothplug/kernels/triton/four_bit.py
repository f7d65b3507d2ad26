"""Triton kernel that unpacks 4-bit weights; the formulas are in ``slothplug.kernels.four_bit``.

A program unpacks whole blocks, each with one scale; their bytes lie in one piece. The table of 16 values is read
through the first-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, uint8

from slothplug.kernels.four_bit import QuantState
from slothplug.kernels.triton.launch import Plan, cached_plan, launch

_BYTES = 4096
"""That a program reads: whole blocks, at least one."""

# A thread reads pieces of 4 bytes and writes each as 8 elements, 16 bytes of half precision at a time; the compiler
# moves longer pieces through shared memory. Several pieces a thread hide the latency of table and scales: on an H200,
# 14336 x 4096 elements in bfloat16 take 52 us with 1, 42 with 4, 40 with 8; a copy of as many bytes takes 35.
_PIECE = tl.constexpr(4)
_PIECES = 8


@triton.jit
def dequantize_kernel(
    stored: tl.tensor,
    code: tl.tensor,
    absmax: tl.tensor,
    code2: tl.tensor,
    absmax2: tl.tensor,
    offset: tl.tensor,
    out: tl.tensor,
    elements: tl.tensor,
    size: tl.tensor,
    blocks: tl.tensor,
    NESTED_BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Unpacks ``size`` bytes. ``NESTED_BLOCK`` is 0 and three pointers are None where the scales are not quantised."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < blocks
    scale = tl.load(absmax + block, mask=exists, other=0)
    if NESTED_BLOCK:
        scale = tl.load(code2 + scale.to(tl.int32))
        scale = scale * tl.load(absmax2 + block // NESTED_BLOCK, mask=exists, other=0.0) + tl.load(offset)
    scale = scale.to(tl.float32)[:, None]
    byte = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    byte = tl.max_contiguous(tl.multiple_of(byte, (1, _PIECE)), (1, _PIECE))
    packed = tl.load(stored + byte, mask=byte < size, other=0).to(tl.int32)
    first = tl.load(code + (packed >> 4)) * scale
    second = tl.load(code + (packed & 15)) * scale
    element = block[:, None] * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    tl.store(out + element, tl.interleave(first, second), mask=element < elements)


class TritonPrimitives:
    """See ``slothplug.kernels.four_bit.Primitives``."""

    @staticmethod
    def dequantize(stored: Tensor, state: QuantState, out: Tensor) -> None:
        nested = state.state2 if state.nested else None
        plan = _plan(out.numel(), state.blocksize, 0 if nested is None else nested.blocksize)
        if plan is None:
            return
        scales = (None, None, None) if nested is None else (nested.code, nested.absmax, state.offset)
        stored = stored.contiguous()
        launch(plan, out.device, stored.view(uint8), state.code, state.absmax, *scales, out)


@cached_plan
def _plan(elements: int, block: int, nested_block: int) -> Plan | None:
    """The launch for so many elements in blocks of ``block``; None where there are none."""
    if not elements:
        return None
    blocks = triton.cdiv(elements, block)
    block_bytes = block // 2
    of_program = max(1, _BYTES // block_bytes)
    return Plan.of(
        dequantize_kernel,
        (triton.cdiv(blocks, of_program),),
        (elements, triton.cdiv(elements, 2), blocks),
        of_program * block_bytes // (32 * _PIECE.value * _PIECES),
        rounds_products=True,
        NESTED_BLOCK=nested_block,
        BLOCK_BYTES=block_bytes,
        BLOCKS=of_program,
    )
