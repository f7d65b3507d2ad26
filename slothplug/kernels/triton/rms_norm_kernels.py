"""RMSNorm's Triton kernels; rms_norm.py launches them. Formulas and byte counts: ../rms_norm.py.

Row r, counted in memory order, is found by ``row_offset`` from two sizes and, for each tensor, three strides; ``rstd``
is dense in that order. Parameters are, in this order: tensors, sizes, strides, constants. A kernel with ``wide`` in its
name is for rows that are too wide for a tile: one program a row, in blocks of ``COLUMNS`` columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slothplug.kernels.triton.launch import row_offset


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
def rms_norm_forward_kernel(
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
def rms_norm_add_forward_kernel(
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
def rms_norm_forward_wide_kernel(
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
def rms_norm_add_forward_wide_kernel(
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
def rms_norm_backward_kernel(
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
def rms_norm_backward_input_wide_kernel(
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
def rms_norm_backward_weight_wide_kernel(
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
