"""RMSNorm on Triton. Formulas and byte counts: slothplug/kernels/rms_norm.py.

A row of up to 8192 elements stays in registers, so x (and the gradient) is read once. Longer rows are read in blocks
of columns, and their second pass comes from the L2 cache. Short rows, as in QK-norm, share a program.

The weight's gradient comes from a number of programs that the shape alone decides: each sums its rows in registers
into one float32 partial row, and one torch sum adds those up. No atomics; the same input gives the same bits on every
device that compiles the kernel alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from slothplug.kernels.rms_norm import Variant
from slothplug.kernels.row_layout import OUTER_DIMENSIONS, Ints, is_dense, merge_rows, row_order
from slothplug.kernels.triton.launch import Plan, cached_plan, launch, row_offset


class Tile(NamedTuple):
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


def _tile(hidden: int) -> Tile | None:
    """The launch knobs of rows of ``hidden`` elements; None where a row does not fit one program's registers."""
    return next((tile for tile in _TILES if hidden <= tile.max_hidden), None)


class TritonPrimitives:
    """See ``slothplug.kernels.rms_norm.Primitives``."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor | None, variant: Variant, y: torch.Tensor, rstd: torch.Tensor
    ) -> None:
        if x.ndim > OUTER_DIMENSIONS + 1:
            x, y, rstd = x.flatten(0, -2), _matrix_view(y), rstd.view(-1)
        plan = _forward_plan(x.shape, x.stride(), y.stride(), rstd.stride(), variant)
        if plan is not None:
            launch(plan, x.device, x, _dense(weight), y, rstd)

    @staticmethod
    def add_forward(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        variant: Variant,
        h: torch.Tensor,
        y: torch.Tensor,
        rstd: torch.Tensor,
    ) -> None:
        if x.ndim > OUTER_DIMENSIONS + 1:
            x, residual, rstd = x.flatten(0, -2), residual.flatten(0, -2), rstd.view(-1)
            h, y = _matrix_view(h), _matrix_view(y)
        plan = _add_forward_plan(x.shape, x.stride(), residual.stride(), h.stride(), y.stride(), rstd.stride(), variant)
        if plan is not None:
            launch(plan, x.device, x, residual, _dense(weight), h, y, rstd)

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        variant: Variant,
        *,
        grad_x: torch.Tensor | None = None,
        grad_weight: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        if x.ndim > OUTER_DIMENSIONS + 1:
            grad_output, x, rstd = grad_output.flatten(0, -2), x.flatten(0, -2), rstd.reshape(-1)
            grad_x = None if grad_x is None else _matrix_view(grad_x)
        grad_x_strides = None if grad_x is None else grad_x.stride()
        needs_weight = grad_weight is not None
        plan = _backward_plan(
            x.shape, grad_output.stride(), x.stride(), rstd.stride(), grad_x_strides, needs_weight, accumulate, variant
        )
        if plan is None:
            if grad_weight is not None:
                grad_weight.zero_()
            return
        if plan.rstd_order is not None:
            rstd = rstd.permute(plan.rstd_order).contiguous()
        weight = _dense(weight)
        partial = None
        if grad_weight is not None:
            partial = torch.empty(plan.partial_sums, x.shape[-1], dtype=torch.float32, device=x.device)
        if plan.both is not None:
            launch(plan.both, x.device, grad_output, x, weight, rstd, grad_x, partial)
        if plan.for_weight is not None:  # before grad_x is written, which may be grad_output
            launch(plan.for_weight, x.device, grad_output, x, rstd, partial)
        if plan.for_x is not None:
            launch(plan.for_x, x.device, grad_output, x, weight, rstd, grad_x)
        if grad_weight is None or partial is None:
            return
        if grad_weight.dtype is torch.float32:
            torch.sum(partial, 0, out=grad_weight)
        else:
            grad_weight.copy_(partial.sum(0))


def _dense(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.contiguous()


def _matrix_view(destination: torch.Tensor) -> torch.Tensor:
    return destination.view(destination.shape[:-1].numel(), destination.shape[-1])


def _constants(hidden: int, variant: Variant) -> dict[str, Any]:
    """The constants of every kernel that reads the weight."""
    return {"HIDDEN": hidden, "OFFSET": variant.offset, "BEFORE_WEIGHT": variant.casting == "before_weight"}


def _tile_shape(tile: Tile, hidden: int) -> dict[str, Any]:
    return {"ROWS": tile.rows, "COLUMNS": triton.next_power_of_2(hidden)}


def _check_rstd(order: Ints, shape: Ints, strides: Ints) -> None:
    if 0 not in shape and not is_dense(order, shape, strides):
        raise ValueError(f"rstd has strides {strides}: row_layout.empty_row_values makes one of the right strides")


def _check_destinations(shape: Ints, *destinations: Ints) -> None:
    for strides in destinations:
        if strides[-1] != 1 and shape[-1] > 1:
            raise ValueError(f"RMSNorm writes to a last dimension of stride 1, not to strides {strides}")


@cached_plan
def _forward_plan(shape: Ints, x: Ints, y: Ints, rstd: Ints, variant: Variant) -> Plan | None:
    """The launch for tensors of ``shape`` and these strides; None where there is nothing to normalise."""
    order = row_order(x)
    _check_rstd(order, shape, rstd)
    _check_destinations(shape, y)
    merged = merge_rows(order, shape, x, y)
    arguments = (*merged.sizes, *merged.strides[0], x[-1], *merged.strides[1], variant.eps)
    return _one_pass(_forward, _forward_wide, merged.rows, shape[-1], arguments, variant)


@cached_plan
def _add_forward_plan(
    shape: Ints, x: Ints, residual: Ints, h: Ints, y: Ints, rstd: Ints, variant: Variant
) -> Plan | None:
    """As ``_forward_plan``."""
    order = row_order(x)
    _check_rstd(order, shape, rstd)
    _check_destinations(shape, h, y)
    merged = merge_rows(order, shape, x, residual, h, y)
    of_x, of_residual, of_h, of_y = merged.strides
    arguments = (*merged.sizes, *of_x, x[-1], *of_residual, residual[-1], *of_h, *of_y, variant.eps)
    return _one_pass(_add_forward, _add_forward_wide, merged.rows, shape[-1], arguments, variant)


def _one_pass(
    kernel: triton.JITFunction,
    wide_kernel: triton.JITFunction,
    rows: int,
    hidden: int,
    arguments: tuple[int | float, ...],
    variant: Variant,
) -> Plan | None:
    """A forward launch: tiles of rows, or a program for each row that is too wide for a tile."""
    if rows == 0 or hidden == 0:
        return None
    tile = _tile(hidden)
    constants = _constants(hidden, variant)
    if tile is None:
        return Plan.of(wide_kernel, (rows,), arguments, _WIDE_WARPS, COLUMNS=_WIDE_COLUMNS, **constants)
    grid = (triton.cdiv(rows, tile.rows),)
    return Plan.of(kernel, grid, (rows, *arguments), tile.num_warps, **constants, **_tile_shape(tile, hidden))


class _BackwardPlan(NamedTuple):
    """The launches of a backward: one for both gradients, or one for each where registers hold no whole row.

    Attributes:
        rstd_order: the order of dimensions in which rstd has to be copied; None where memory has that order.
        partial_sums: rows of partial sums of the weight's gradient.
        both, for_weight, for_x: the launches.
    """

    rstd_order: Ints | None
    partial_sums: int
    both: Plan | None = None
    for_weight: Plan | None = None
    for_x: Plan | None = None


@cached_plan
def _backward_plan(
    shape: Ints,
    grad_output: Ints,
    x: Ints,
    rstd: Ints,
    grad_x: Ints | None,
    needs_weight: bool,
    accumulate: bool,
    variant: Variant,
) -> _BackwardPlan | None:
    """The launches for tensors of ``shape`` and these strides; None where there is nothing normalised."""
    order = row_order(x)
    rstd_order = None if is_dense(order, shape, rstd) else order
    if grad_x is not None:
        _check_destinations(shape, grad_x)
    merged = merge_rows(order, shape, grad_output, x, x if grad_x is None else grad_x)
    rows, hidden = merged.rows, shape[-1]
    if rows == 0 or hidden == 0:
        return None
    of_grad, of_x, of_grad_x = merged.strides
    inputs = (*merged.sizes, *of_grad, grad_output[-1], *of_x, x[-1])
    constants = _constants(hidden, variant)
    tile = _tile(hidden)
    if tile is None:
        partial_sums = min(rows, _WIDE_PARTIAL_SUMS)
        for_weight = for_x = None
        if needs_weight:
            grid = (partial_sums, triton.cdiv(hidden, _WIDE_COLUMNS))
            for_weight = Plan.of(
                _backward_weight_wide, grid, (rows, *inputs), _WIDE_WARPS, HIDDEN=hidden, COLUMNS=_WIDE_COLUMNS
            )
        if grad_x is not None:
            constants |= {"ACCUMULATE": accumulate, "COLUMNS": _WIDE_COLUMNS}
            for_x = Plan.of(_backward_input_wide, (rows,), (*inputs, *of_grad_x), _WIDE_WARPS, **constants)
        return _BackwardPlan(rstd_order, partial_sums, for_weight=for_weight, for_x=for_x)
    tiles = triton.cdiv(rows, tile.rows)
    tiles_each = triton.cdiv(tiles, tile.partial_sums) if needs_weight else 1
    programs = triton.cdiv(tiles, tiles_each)
    constants |= {"ACCUMULATE": accumulate, **_tile_shape(tile, hidden)}
    arguments = (rows, tiles_each, *inputs, *of_grad_x)
    both = Plan.of(_backward, (programs,), arguments, tile.num_warps, **constants)
    return _BackwardPlan(rstd_order, programs, both)


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
def _normalise_tile(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    y_row: tl.tensor,
    mask: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes the norms of a tile of rows ``x`` [ROWS, COLUMNS], in the dtype that they are rounded to."""
    column = tl.arange(0, COLUMNS)
    x32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x32 * x32, axis=1) / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x32 * rstd[:, None]
    if weight_ptr is not None:
        if BEFORE_WEIGHT:
            y = y.to(x.dtype).to(tl.float32)
        y *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)[None, :]
    tl.store(y_ptr + y_row[:, None] + column[None, :], y, mask=mask)


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
    y_stride_0: tl.tensor,
    y_stride_1: tl.tensor,
    y_stride_2: tl.tensor,
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
    y_row = row_offset(row, size_1, size_2, y_stride_0, y_stride_1, y_stride_2)
    x = tl.load(x_ptr + x_row[:, None] + column.to(tl.int64)[None, :] * x_stride_column, mask=mask, other=0.0)
    _normalise_tile(x, weight_ptr, y_ptr, rstd_ptr, row, rows, y_row, mask, eps, HIDDEN, OFFSET, BEFORE_WEIGHT, COLUMNS)


@triton.jit
def _add_forward(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    h_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    rows: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    residual_stride_0: tl.tensor,
    residual_stride_1: tl.tensor,
    residual_stride_2: tl.tensor,
    residual_stride_column: tl.tensor,
    h_stride_0: tl.tensor,
    h_stride_1: tl.tensor,
    h_stride_2: tl.tensor,
    y_stride_0: tl.tensor,
    y_stride_1: tl.tensor,
    y_stride_2: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    column64 = column.to(tl.int64)[None, :]
    mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    x_row = row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    residual_row = row_offset(row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2)
    h_row = row_offset(row, size_1, size_2, h_stride_0, h_stride_1, h_stride_2)
    y_row = row_offset(row, size_1, size_2, y_stride_0, y_stride_1, y_stride_2)
    x = tl.load(x_ptr + x_row[:, None] + column64 * x_stride_column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + residual_row[:, None] + column64 * residual_stride_column, mask=mask, other=0.0)
    h = (x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + h_row[:, None] + column[None, :], h, mask=mask)
    _normalise_tile(h, weight_ptr, y_ptr, rstd_ptr, row, rows, y_row, mask, eps, HIDDEN, OFFSET, BEFORE_WEIGHT, COLUMNS)


@triton.jit
def _scale_wide(
    x_ptr: tl.tensor,
    x_stride_column: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The second pass over a row that is too wide for a tile: writes y."""
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column.to(tl.int64) * x_stride_column, mask=column < HIDDEN, other=0.0)
        y = x.to(tl.float32) * rstd
        if weight_ptr is not None:
            if BEFORE_WEIGHT:
                y = y.to(x.dtype).to(tl.float32)
            y *= _load_scale(weight_ptr, column, HIDDEN, OFFSET, BEFORE_WEIGHT)
        tl.store(y_ptr + column, y, mask=column < HIDDEN)


@triton.jit
def _forward_wide(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    y_stride_0: tl.tensor,
    y_stride_1: tl.tensor,
    y_stride_2: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    y_ptr += row_offset(row, size_1, size_2, y_stride_0, y_stride_1, y_stride_2)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x32 = tl.load(x_ptr + column.to(tl.int64) * x_stride_column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        squares += x32 * x32
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd)
    _scale_wide(x_ptr, x_stride_column, weight_ptr, y_ptr, rstd, HIDDEN, OFFSET, BEFORE_WEIGHT, COLUMNS)


@triton.jit
def _add_forward_wide(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    h_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    size_1: tl.tensor,
    size_2: tl.tensor,
    x_stride_0: tl.tensor,
    x_stride_1: tl.tensor,
    x_stride_2: tl.tensor,
    x_stride_column: tl.tensor,
    residual_stride_0: tl.tensor,
    residual_stride_1: tl.tensor,
    residual_stride_2: tl.tensor,
    residual_stride_column: tl.tensor,
    h_stride_0: tl.tensor,
    h_stride_1: tl.tensor,
    h_stride_2: tl.tensor,
    y_stride_0: tl.tensor,
    y_stride_1: tl.tensor,
    y_stride_2: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    residual_ptr += row_offset(row, size_1, size_2, residual_stride_0, residual_stride_1, residual_stride_2)
    h_ptr += row_offset(row, size_1, size_2, h_stride_0, h_stride_1, h_stride_2)
    y_ptr += row_offset(row, size_1, size_2, y_stride_0, y_stride_1, y_stride_2)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask, column64 = column < HIDDEN, column.to(tl.int64)
        x = tl.load(x_ptr + column64 * x_stride_column, mask=mask, other=0.0)
        residual = tl.load(residual_ptr + column64 * residual_stride_column, mask=mask, other=0.0)
        h = (x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + column, h, mask=mask)
        h32 = h.to(tl.float32)
        squares += h32 * h32
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.debug_barrier()  # h is read back, perhaps by other threads than those that stored it
    _scale_wide(h_ptr, 1, weight_ptr, y_ptr, rstd, HIDDEN, OFFSET, BEFORE_WEIGHT, COLUMNS)


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
    grad_x_stride_0: tl.tensor,
    grad_x_stride_1: tl.tensor,
    grad_x_stride_2: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
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
            grad_x_row = row_offset(row, size_1, size_2, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2)
            target = grad_x_ptr + grad_x_row[:, None] + column[None, :]
            if ACCUMULATE:
                grad_x += tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, grad_x, mask=mask)
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
    grad_x_stride_0: tl.tensor,
    grad_x_stride_1: tl.tensor,
    grad_x_stride_2: tl.tensor,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row_offset(row, size_1, size_2, grad_stride_0, grad_stride_1, grad_stride_2)
    x_ptr += row_offset(row, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)
    grad_x_ptr += row_offset(row, size_1, size_2, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2)
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
        grad_x = (grad - x * rstd * projection) * rstd
        if ACCUMULATE:
            grad_x += tl.load(grad_x_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + column, grad_x, mask=mask)


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
