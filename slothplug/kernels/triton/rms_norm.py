"""RMSNorm on Triton: the launches of the kernels in rms_norm_kernels.py. Formulas, byte counts: ../rms_norm.py.

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

from slothplug.kernels.rms_norm import Variant
from slothplug.kernels.row_layout import OUTER_DIMENSIONS, Ints, is_dense, merge_rows, row_order
from slothplug.kernels.triton.launch import Plan, cached_plan, launch
from slothplug.kernels.triton.rms_norm_kernels import (
    rms_norm_add_forward_kernel,
    rms_norm_add_forward_wide_kernel,
    rms_norm_backward_input_wide_kernel,
    rms_norm_backward_kernel,
    rms_norm_backward_weight_wide_kernel,
    rms_norm_forward_kernel,
    rms_norm_forward_wide_kernel,
)


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
    return _one_pass(rms_norm_forward_kernel, rms_norm_forward_wide_kernel, merged.rows, shape[-1], arguments, variant)


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
    return _one_pass(
        rms_norm_add_forward_kernel, rms_norm_add_forward_wide_kernel, merged.rows, shape[-1], arguments, variant
    )


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
                rms_norm_backward_weight_wide_kernel,
                grid,
                (rows, *inputs),
                _WIDE_WARPS,
                HIDDEN=hidden,
                COLUMNS=_WIDE_COLUMNS,
            )
        if grad_x is not None:
            constants |= {"ACCUMULATE": accumulate, "COLUMNS": _WIDE_COLUMNS}
            for_x = Plan.of(
                rms_norm_backward_input_wide_kernel, (rows,), (*inputs, *of_grad_x), _WIDE_WARPS, **constants
            )
        return _BackwardPlan(rstd_order, partial_sums, for_weight=for_weight, for_x=for_x)
    tiles = triton.cdiv(rows, tile.rows)
    tiles_each = triton.cdiv(tiles, tile.partial_sums) if needs_weight else 1
    programs = triton.cdiv(tiles, tiles_each)
    constants |= {"ACCUMULATE": accumulate, **_tile_shape(tile, hidden)}
    arguments = (rows, tiles_each, *inputs, *of_grad_x)
    both = Plan.of(rms_norm_backward_kernel, (programs,), arguments, tile.num_warps, **constants)
    return _BackwardPlan(rstd_order, programs, both)
