"""Rotary position embedding on Triton. Formulas and byte counts: slothplug/kernels/rotary.py.

One program rotates all heads of q and of k at one token, so the tables are read once a token, and one launch serves
both. Every tensor is addressed through its strides: neither the transposed views that attention works on nor a
gradient that autograd expanded is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slothplug.kernels.rotary import Pair, Rotation
from slothplug.kernels.row_layout import Ints
from slothplug.kernels.triton.launch import Plan, cached_plan, launch


class Tile(NamedTuple):
    """Launch knobs of tiles of at most ``elements`` elements (heads times rotated width)."""

    elements: int
    num_warps: int


# 16 elements a thread: a 16-byte load of bfloat16 for each half of the pairs. A tile of 4096 elements is 32 heads of
# 128; more heads take another iteration of the loop, as larger tiles would leave too few programs on a multiprocessor.
_TILES = (Tile(elements=512, num_warps=1), Tile(elements=2048, num_warps=4), Tile(elements=4096, num_warps=8))


class TritonPrimitives:
    """See ``slothplug.kernels.rotary.Primitives``."""

    @staticmethod
    def rotate(pairs: Sequence[Pair], cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> None:
        if sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        x, y = pairs[0]
        x2, y2 = pairs[1] if len(pairs) == 2 else (None, None)
        second = None if x2 is None or y2 is None else (x2.shape[1], x2.stride(), y2.stride())
        plan = _plan(x.shape, x.stride(), y.stride(), second, cos.shape[0] > 1, cos.stride(), rotation)
        launch(plan, x.device, x, y, x2, y2, cos, sin)


@cached_plan
def _plan(
    shape: Ints,
    x: Ints,
    y: Ints,
    second: tuple[int, Ints, Ints] | None,
    tables_of_rows: bool,
    table: Ints,
    rotation: Rotation,
) -> Plan:
    """The launch for a pair of ``shape`` and strides x, y, and perhaps another.

    Args:
        second: the heads of the other pair, and its strides.
        tables_of_rows: the tables have rows of their own for each row of the batch.
        table: strides of cos and sin.
    """
    batch, heads, tokens, head_dim = shape
    heads_2, x2, y2 = second or (1, (0,) * 4, (0,) * 4)
    width = triton.next_power_of_2(rotation.width)
    block = min(triton.next_power_of_2(heads), max(1, _TILES[-1].elements // width))
    block_2 = min(triton.next_power_of_2(heads_2), block)
    tile = next((tile for tile in _TILES if block * width <= tile.elements), _TILES[-1])
    arguments = (tokens, *x, *y, *x2, *y2, table[0] if tables_of_rows else 0, table[1], table[2])
    return Plan.of(
        _rotate,
        (batch * tokens,),
        arguments,
        tile.num_warps,
        HEADS=heads,
        HEADS_2=heads_2,
        HEAD_DIM=head_dim,
        START=rotation.start,
        WIDTH=rotation.width,
        READS_INTERLEAVED=rotation.reads_interleaved,
        WRITES_INTERLEAVED=rotation.writes_interleaved,
        TABLE_STRIDE=2 if rotation.table == "neighbours" else 1,
        TABLE_SECOND={"halves": rotation.width // 2, "neighbours": 1, "shared": 0}[rotation.table],
        TRANSPOSED=rotation.transposed,
        BLOCK=block,
        BLOCK_2=block_2,
        PAIRS=width // 2,
        REST=triton.next_power_of_2(head_dim - rotation.width) if rotation.width < head_dim else 0,
    )


@triton.jit
def _load_pairs(
    row_ptr: tl.tensor,
    row_mask: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The first and the second elements of all pairs of some heads, [heads, PAIRS] float32 each."""
    if INTERLEAVED:
        # One contiguous load, split in registers; two loads of every other element would fetch each sector twice.
        i = tl.arange(0, 2 * PAIRS)
        x = tl.load(row_ptr + i.to(tl.int64)[None, :] * stride, mask=row_mask & (i < WIDTH)[None, :], other=0.0)
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    else:
        i = tl.arange(0, PAIRS)
        mask = row_mask & (i < WIDTH // 2)[None, :]
        x0 = tl.load(row_ptr + i.to(tl.int64)[None, :] * stride, mask=mask, other=0.0)
        x1 = tl.load(row_ptr + (i + WIDTH // 2).to(tl.int64)[None, :] * stride, mask=mask, other=0.0)
    return x0.to(tl.float32), x1.to(tl.float32)


@triton.jit
def _store_pairs(
    row_ptr: tl.tensor,
    row_mask: tl.tensor,
    stride: tl.tensor,
    y0: tl.tensor,
    y1: tl.tensor,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    if INTERLEAVED:
        i = tl.arange(0, 2 * PAIRS)
        y = tl.interleave(y0, y1)
        tl.store(row_ptr + i.to(tl.int64)[None, :] * stride, y, mask=row_mask & (i < WIDTH)[None, :])
    else:
        i = tl.arange(0, PAIRS)
        mask = row_mask & (i < WIDTH // 2)[None, :]
        tl.store(row_ptr + i.to(tl.int64)[None, :] * stride, y0, mask=mask)
        tl.store(row_ptr + (i + WIDTH // 2).to(tl.int64)[None, :] * stride, y1, mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride_head: tl.tensor,
    x_stride_dim: tl.tensor,
    y_stride_head: tl.tensor,
    y_stride_dim: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    READS_INTERLEAVED: tl.constexpr,
    WRITES_INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """All heads of one tensor at one token, BLOCK heads an iteration; the pointers are those of the token."""
    for first in range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)
        mask = (head < HEADS)[:, None]
        x_row = x_ptr + head.to(tl.int64)[:, None] * x_stride_head
        y_row = y_ptr + head.to(tl.int64)[:, None] * y_stride_head
        x0, x1 = _load_pairs(x_row + START * x_stride_dim, mask, x_stride_dim, WIDTH, PAIRS, READS_INTERLEAVED)
        if TRANSPOSED:
            y0 = x0 * c0 + x1 * s1
            y1 = x1 * c1 - x0 * s0
        else:
            y0 = x0 * c0 - x1 * s0
            y1 = x1 * c1 + x0 * s1
        y_start = y_row + START * y_stride_dim
        _store_pairs(y_start, mask, y_stride_dim, y0, y1, WIDTH, PAIRS, WRITES_INTERLEAVED)
        if REST > 0:
            # What is not rotated lies after the rotated elements, or before them.
            i = tl.arange(0, REST)
            rest = ((WIDTH if START == 0 else 0) + i).to(tl.int64)[None, :]
            rest_mask = mask & (i < HEAD_DIM - WIDTH)[None, :]
            tl.store(y_row + rest * y_stride_dim, tl.load(x_row + rest * x_stride_dim, mask=rest_mask), mask=rest_mask)


@triton.jit
def _rotate(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x2_ptr: tl.tensor,
    y2_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride_batch: tl.tensor,
    x_stride_head: tl.tensor,
    x_stride_token: tl.tensor,
    x_stride_dim: tl.tensor,
    y_stride_batch: tl.tensor,
    y_stride_head: tl.tensor,
    y_stride_token: tl.tensor,
    y_stride_dim: tl.tensor,
    x2_stride_batch: tl.tensor,
    x2_stride_head: tl.tensor,
    x2_stride_token: tl.tensor,
    x2_stride_dim: tl.tensor,
    y2_stride_batch: tl.tensor,
    y2_stride_head: tl.tensor,
    y2_stride_token: tl.tensor,
    y2_stride_dim: tl.tensor,
    table_stride_batch: tl.tensor,
    table_stride_token: tl.tensor,
    table_stride_dim: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    READS_INTERLEAVED: tl.constexpr,
    WRITES_INTERLEAVED: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    TABLE_SECOND: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_2: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    batch = tl.program_id(0).to(tl.int64) // tokens
    token = tl.program_id(0).to(tl.int64) % tokens
    pair = tl.arange(0, PAIRS)
    mask = pair < WIDTH // 2
    row = batch * table_stride_batch + token * table_stride_token
    entry = row + (pair * TABLE_STRIDE).to(tl.int64) * table_stride_dim
    c0 = tl.load(cos_ptr + entry, mask=mask, other=0.0).to(tl.float32)[None, :]
    s0 = tl.load(sin_ptr + entry, mask=mask, other=0.0).to(tl.float32)[None, :]
    c1, s1 = c0, s0
    if TABLE_SECOND > 0:
        entry += TABLE_SECOND * table_stride_dim
        c1 = tl.load(cos_ptr + entry, mask=mask, other=0.0).to(tl.float32)[None, :]
        s1 = tl.load(sin_ptr + entry, mask=mask, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        x_ptr + batch * x_stride_batch + token * x_stride_token,
        y_ptr + batch * y_stride_batch + token * y_stride_token,
        x_stride_head,
        x_stride_dim,
        y_stride_head,
        y_stride_dim,
        c0,
        c1,
        s0,
        s1,
        HEADS,
        HEAD_DIM,
        START,
        WIDTH,
        READS_INTERLEAVED,
        WRITES_INTERLEAVED,
        TRANSPOSED,
        BLOCK,
        PAIRS,
        REST,
    )
    if x2_ptr is not None:
        _rotate_heads(
            x2_ptr + batch * x2_stride_batch + token * x2_stride_token,
            y2_ptr + batch * y2_stride_batch + token * y2_stride_token,
            x2_stride_head,
            x2_stride_dim,
            y2_stride_head,
            y2_stride_dim,
            c0,
            c1,
            s0,
            s1,
            HEADS_2,
            HEAD_DIM,
            START,
            WIDTH,
            READS_INTERLEAVED,
            WRITES_INTERLEAVED,
            TRANSPOSED,
            BLOCK_2,
            PAIRS,
            REST,
        )
