"""RMSNorm on Triton. Formulas and byte counts: slothplug/kernels/rms_norm.py.

A row of up to 8192 elements stays in registers, so x (and the gradient) is read once. Longer rows are walked in blocks
of columns, and their second pass comes from the L2 cache. Short rows, as in QK-norm, share a program.

The weight's gradient comes from a number of programs that the shape alone decides: each sums its rows in registers
into one float32 partial row, and one torch sum adds those up. No atomics; the same input gives the same bits on every
device that compiles the kernel alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slothplug.kernels.rms_norm import Variant, output_dtype
from slothplug.kernels.triton.launch import Rows, empty_in_order, launch, row_offset, row_order


@dataclass(frozen=True)
class Tile:
    """Launch knobs of rows with at most ``max_hidden`` elements.

    Attributes:
        rows: rows that a program holds at once.
        num_warps: warps of a program.
        partial_sums: the most programs that the weight's gradient is summed by.
    """

    max_hidden: int
    rows: int
    num_warps: int
    partial_sums: int


# 16 elements a thread: two 16-byte loads of bfloat16 in flight for each stream, in few enough registers that 24 or more
# warps are resident (compiled for sm_90: 32 registers forward, 48 backward, 80 with the partial sum of the weight).
# partial_sums: all programs of the latter kind resident at once on about 130 multiprocessors (6 of 4 warps or 3 of
# 8 warps on each). More would gain no parallelism and cost 8 bytes an element: 6 % of the traffic at 8192 x 4096.
_TILES = (
    Tile(max_hidden=64, rows=32, num_warps=4, partial_sums=768),
    Tile(max_hidden=128, rows=16, num_warps=4, partial_sums=768),
    Tile(max_hidden=256, rows=8, num_warps=4, partial_sums=768),
    Tile(max_hidden=512, rows=4, num_warps=4, partial_sums=768),
    Tile(max_hidden=1024, rows=2, num_warps=4, partial_sums=768),
    Tile(max_hidden=2048, rows=1, num_warps=4, partial_sums=768),
    Tile(max_hidden=4096, rows=1, num_warps=8, partial_sums=384),
    Tile(max_hidden=8192, rows=1, num_warps=16, partial_sums=256),
)
# Rows beyond the table: 4096 columns at a time; their many column blocks give programs enough with few partial rows.
_WIDE_COLUMNS, _WIDE_WARPS, _WIDE_PARTIAL_SUMS = 4096, 8, 64


@functools.cache
def _tile(hidden: int) -> Tile | None:
    """The launch knobs of rows of ``hidden`` elements; None where a row does not fit one program's registers."""
    return next((tile for tile in _TILES if hidden <= tile.max_hidden), None)


class TritonPrimitives:
    """See ``slothplug.kernels.rms_norm.Primitives``. ``rstd`` is shaped like x without its last dimension."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor | None, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
        order = row_order(x)
        y = empty_in_order(x.shape, order, output_dtype(x, weight, variant.casting), x.device)
        rows = Rows(order, x)
        rstd = empty_in_order(x.shape[:-1], order, torch.float32, x.device)
        if x.numel() == 0:
            return y, rstd
        hidden = x.shape[-1]
        arguments = (*rows.tensors, _dense(weight), y, rstd, rows.count, *rows.sizes, *rows.strides[0], variant.eps)
        constants = (hidden, variant.offset, variant.casting == "before_weight")
        tile = _tile(hidden)
        if tile is None:
            grid = (rows.count,)
            launch(_forward_wide, grid, x.device, *arguments, *constants, _WIDE_COLUMNS, num_warps=_WIDE_WARPS)
        else:
            grid = (triton.cdiv(rows.count, tile.rows),)
            shape = (tile.rows, triton.next_power_of_2(hidden))
            launch(_forward, grid, x.device, *arguments, *constants, *shape, num_warps=tile.num_warps)
        return y, rstd

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        variant: Variant,
        needs: tuple[bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        order = row_order(x)
        grad_x = empty_in_order(x.shape, order, x.dtype, x.device) if needs[0] else None
        if x.numel() == 0:
            return grad_x, torch.zeros_like(weight) if needs[1] and weight is not None else None
        # No copy, unless a saved-tensor hook (offloading) gave back x or rstd with other strides than it was handed.
        rstd = rstd.permute(order).contiguous()
        rows = Rows(order, grad_output, x)
        hidden = x.shape[-1]
        constants = (hidden, variant.offset, variant.casting == "before_weight")
        backward = _backward_wide_rows if _tile(hidden) is None else _backward_tiles
        needs_weight = needs[1] and weight is not None
        partial = backward(rows, _dense(weight), rstd, grad_x, needs_weight, constants)
        grad_weight = partial.sum(0).to(weight.dtype) if partial is not None and weight is not None else None
        return grad_x, grad_weight


def _dense(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.contiguous()


def _backward_tiles(
    rows: Rows,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_x: torch.Tensor | None,
    needs_weight: bool,
    constants: tuple[int, float, bool],
) -> torch.Tensor | None:
    """One launch for both gradients; returns the partial sums [programs, H] of the weight's, where asked for."""
    tile = _tile(constants[0])
    assert tile is not None
    tiles = triton.cdiv(rows.count, tile.rows)
    tiles_each = triton.cdiv(tiles, tile.partial_sums) if needs_weight else 1
    programs = triton.cdiv(tiles, tiles_each)
    partial = torch.empty(programs, constants[0], dtype=torch.float32, device=rstd.device) if needs_weight else None
    arguments = (*rows.tensors, weight, rstd, grad_x, partial, rows.count, tiles_each)
    strides = (*rows.sizes, *rows.strides[0], *rows.strides[1])
    shape = (tile.rows, triton.next_power_of_2(constants[0]))
    launch(_backward, (programs,), rstd.device, *arguments, *strides, *constants, *shape, num_warps=tile.num_warps)
    return partial


def _backward_wide_rows(
    rows: Rows,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_x: torch.Tensor | None,
    needs_weight: bool,
    constants: tuple[int, float, bool],
) -> torch.Tensor | None:
    """A launch for each gradient: registers do not hold a whole row of partial sums."""
    options = {"num_warps": _WIDE_WARPS}
    strides = (*rows.sizes, *rows.strides[0], *rows.strides[1])
    if grad_x is not None:
        arguments = (*rows.tensors, weight, rstd, grad_x, *strides, *constants, _WIDE_COLUMNS)
        launch(_backward_input_wide, (rows.count,), rstd.device, *arguments, **options)
    if not needs_weight:
        return None
    hidden = constants[0]
    programs = min(rows.count, _WIDE_PARTIAL_SUMS)
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=rstd.device)
    grid = (programs, triton.cdiv(hidden, _WIDE_COLUMNS))
    arguments = (*rows.tensors, rstd, partial, rows.count, *strides, hidden, _WIDE_COLUMNS)
    launch(_backward_weight_wide, grid, rstd.device, *arguments, **options)
    return partial


@triton.jit
def _load_scale(
    weight_ptr: tl.tensor,
    column: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """weight + offset in float32; before the weight the sum is first rounded to the weight's dtype, as stock does."""
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0)
    scale = weight.to(tl.float32)
    if OFFSET != 0.0:
        scale += OFFSET
        if BEFORE_WEIGHT:
            scale = scale.to(weight.dtype).to(tl.float32)
    return scale


@triton.jit
def _forward(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    rows: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    x_row = row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    x = tl.load(x_ptr + x_row[:, None] + column.to(tl.int64)[None, :] * x_stride_column, mask=mask, other=0.0)
    x32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x32 * x32, axis=1) / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x32 * rstd[:, None]
    if weight_ptr is not None:
        if BEFORE_WEIGHT:
            y = y.to(x.dtype).to(tl.float32)
        y *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)[None, :]
    tl.store(y_ptr + row[:, None] * HIDDEN + column[None, :], y, mask=mask)


@triton.jit
def _forward_wide(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    rows: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x32 = tl.load(x_ptr + column.to(tl.int64) * x_stride_column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        squares += x32 * x32
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column.to(tl.int64) * x_stride_column, mask=column < HIDDEN, other=0.0)
        y = x.to(tl.float32) * rstd
        if weight_ptr is not None:
            if BEFORE_WEIGHT:
                y = y.to(x.dtype).to(tl.float32)
            y *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)
        tl.store(y_ptr + row * HIDDEN + column, y, mask=column < HIDDEN)


@triton.jit
def _backward(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    grad_stride_0: tl.tensor,
    grad_stride_1: tl.tensor,
    grad_stride_2: tl.tensor,
    grad_stride_column: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """``tiles`` tiles of rows a program: one where only the input's gradient is asked for."""
    column = tl.arange(0, COLUMNS)
    column64 = column.to(tl.int64)
    if weight_ptr is not None:
        scale = _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)[None, :]
    partial = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in range(tiles):
        first = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * ROWS
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
        grad_row = row_offset(row, size_1, size_2, grad_stride_0, grad_stride_1, grad_stride_2)
        x_row = row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
        grad = tl.load(grad_ptr + grad_row[:, None] + column64[None, :] * grad_stride_column, mask=mask, other=0.0)
        x = tl.load(x_ptr + x_row[:, None] + column64[None, :] * x_stride_column, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        grad = grad.to(tl.float32)
        n = x.to(tl.float32) * rstd
        if partial_ptr is not None:
            partial += grad * n
        if grad_x_ptr is not None:
            if weight_ptr is not None:
                grad *= scale
            projection = tl.sum(grad * n, axis=1)[:, None] / HIDDEN
            grad_x = (grad - n * projection) * rstd
            tl.store(grad_x_ptr + row[:, None] * HIDDEN + column[None, :], grad_x, mask=mask)
    if partial_ptr is not None:
        partial_row = partial_ptr + tl.program_id(0).to(tl.int64) * HIDDEN
        tl.store(partial_row + column, tl.sum(partial, axis=0), mask=column < HIDDEN)


@triton.jit
def _backward_input_wide(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    grad_x_ptr: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    grad_stride_0: tl.tensor,
    grad_stride_1: tl.tensor,
    grad_stride_2: tl.tensor,
    grad_stride_column: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row_offset(row, size_1, size_2, grad_stride_0, grad_stride_1, grad_stride_2)
    x_ptr += row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask, column64 = column < HIDDEN, column.to(tl.int64)
        grad = tl.load(grad_ptr + column64 * grad_stride_column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + column64 * x_stride_column, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            grad *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)
        products += grad * (x * rstd)
    projection = tl.sum(products, axis=0) / HIDDEN
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask, column64 = column < HIDDEN, column.to(tl.int64)
        grad = tl.load(grad_ptr + column64 * grad_stride_column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + column64 * x_stride_column, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            grad *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)
        tl.store(grad_x_ptr + row * HIDDEN + column, (grad - x * rstd * projection) * rstd, mask=mask)


@triton.jit
def _backward_weight_wide(
    grad_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    rows: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    grad_stride_0: tl.tensor,
    grad_stride_1: tl.tensor,
    grad_stride_2: tl.tensor,
    grad_stride_column: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One partial sum, of rows p, p + programs, ..., of one block of columns."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column64 = column.to(tl.int64)
    partial = tl.zeros([COLUMNS], dtype=tl.float32)
    mask = column < HIDDEN
    for i in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0).to(tl.int64) + i * tl.num_programs(0)
        grad_row = grad_ptr + row_offset(row, size_1, size_2, grad_stride_0, grad_stride_1, grad_stride_2)
        x_row = x_ptr + row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
        grad = tl.load(grad_row + column64 * grad_stride_column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_row + column64 * x_stride_column, mask=mask, other=0.0).to(tl.float32)
        partial += grad * (x * tl.load(rstd_ptr + row))
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * HIDDEN + column, partial, mask=mask)
