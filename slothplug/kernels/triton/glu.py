"""Triton kernels of the gated linear unit; the formulas and the precision are in ``slothplug.kernels.glu``.

One launch a direction. A program serves ``BLOCK`` neighbouring columns of one row; where all tensors are contiguous the
whole problem is one long row, so that no lane idles whatever the row's length. There are no reductions: the same input
gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from slothplug.kernels.glu import Activation
from slothplug.kernels.row_layout import Ints, is_dense, matrix_stride
from slothplug.kernels.triton.launch import Plan, cached_plan, launch


class Tile(NamedTuple):
    """Columns one program serves, and its warps."""

    block: int
    num_warps: int


# 8 elements a thread on 32-wide warps: one 16-byte access to each half-precision tensor, two in float32; a thread of a
# 64-wide wavefront has half of it. 128 threads (256 there) let 16 programs (8) share a multiprocessor, which is what
# hides the latency of memory.
_WIDE = Tile(block=1024, num_warps=4)
# Rows that are strided and short (a small expert's halves): 1024 columns would leave most lanes without work.
_NARROW = Tile(block=256, num_warps=1)
_NARROW_COLUMNS = 512


def _choose_tile(columns: int) -> Tile:
    return _NARROW if columns <= _NARROW_COLUMNS else _WIDE


@triton.jit
def sigmoid_argument(x: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """z(x) and dz/dx of the activations that are made of sigmoid(z)."""
    if ACTIVATION == "gelu_tanh":
        # sqrt(8 / pi) (x + 0.044715 x^3) and its derivative; x (c + d x^2) keeps the sign where x^2 overflows.
        square = x * x
        z = x * (1.5957691216057308 + 0.07135481627260025 * square)
        slope = 1.5957691216057308 + 0.21406444881780073 * square
    elif ACTIVATION == "quick_gelu":
        z = 1.702 * x
        slope = 1.702
    else:
        z = x
        slope = 1.0
    return z, slope


@triton.jit
def activate_and_differentiate(x: tl.tensor, grad: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """act(x) and grad * act'(x) for float32 x and grad. The latter is 0 where relu is flat, even if grad is inf."""
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        activated = x * cdf
        grad_x = grad * (cdf + x * density)
    elif ACTIVATION == "relu":
        activated = tl.where(x <= 0, 0.0, x)  # tl.maximum would turn NaN into 0
        grad_x = tl.where(x <= 0, 0.0, grad)
    elif ACTIVATION == "relu2":
        activated = tl.where(x <= 0, 0.0, x * x)
        grad_x = tl.where(x <= 0, 0.0, grad * x * 2.0)
    elif ACTIVATION == "sigmoid":
        activated = tl.sigmoid(x)
        grad_x = grad * (activated * (1.0 - activated))
    else:
        z, slope = sigmoid_argument(x, ACTIVATION)
        s = tl.sigmoid(z)
        activated = x * s
        # s (1 - s) x first: it is 0 long before x * slope overflows.
        grad_x = grad * (s + s * (1.0 - s) * x * slope)
    return activated, grad_x


@triton.jit
def _block(columns: tl.tensor, column_blocks: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Row, columns (both int64) and mask of this program."""
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64)
    column = (program % column_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < columns


@triton.jit
def glu_forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    column_blocks: tl.tensor,
    gate_row: tl.tensor,
    gate_column: tl.tensor,
    up_row: tl.tensor,
    up_column: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = act(gate) * up. The integers after the pointers are strides in elements."""
    row, column, mask = _block(columns, column_blocks, BLOCK)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column * up_column, mask=mask, other=0.0).to(tl.float32)
    activated, _ = activate_and_differentiate(x, y, ACTIVATION)  # the compiler drops the derivative
    tl.store(out + row * out_row + column * out_column, activated * y, mask=mask)


@triton.jit
def glu_backward_kernel(
    grad_output: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    columns: tl.tensor,
    column_blocks: tl.tensor,
    grad_row: tl.tensor,
    grad_column: tl.tensor,
    gate_row: tl.tensor,
    gate_column: tl.tensor,
    up_row: tl.tensor,
    up_column: tl.tensor,
    grad_gate_row: tl.tensor,
    grad_gate_column: tl.tensor,
    grad_up_row: tl.tensor,
    grad_up_column: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """grad_gate and grad_up, each where its pointer is not None."""
    row, column, mask = _block(columns, column_blocks, BLOCK)
    grad = tl.load(grad_output + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column * up_column, mask=mask, other=0.0).to(tl.float32)
    activated, grad_x = activate_and_differentiate(x, grad * y, ACTIVATION)
    if grad_gate is not None:
        tl.store(grad_gate + row * grad_gate_row + column * grad_gate_column, grad_x, mask=mask)
    if grad_up is not None:
        tl.store(grad_up + row * grad_up_row + column * grad_up_column, grad * activated, mask=mask)


class TritonPrimitives:
    """See ``slothplug.kernels.glu.Primitives``."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: Activation, out: Tensor) -> None:
        plan = _plan(glu_forward_kernel, activation, gate.shape, (gate.stride(), up.stride()), (out.stride(),))
        if plan is not None:
            launch(plan.launch, gate.device, *_readable(plan, gate, up), out)

    @staticmethod
    def backward(
        grad_output: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        *,
        grad_gate: Tensor | None = None,
        grad_up: Tensor | None = None,
    ) -> None:
        inputs = (grad_output.stride(), gate.stride(), up.stride())
        outputs = (None if grad_gate is None else grad_gate.stride(), None if grad_up is None else grad_up.stride())
        plan = _plan(glu_backward_kernel, activation, gate.shape, inputs, outputs)
        if plan is not None:
            launch(plan.launch, gate.device, *_readable(plan, grad_output, gate, up), grad_gate, grad_up)


class _Plan(NamedTuple):
    """A launch, and for each input whether its rows collapse only in a copy; empty where all inputs' rows do."""

    launch: Plan
    copied: tuple[bool, ...]


def _readable(plan: _Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
    if not plan.copied:
        return inputs
    return tuple(t.contiguous() if copied else t for t, copied in zip(inputs, plan.copied, strict=True))


@cached_plan
def _plan(
    kernel: Any, activation: Activation, shape: Ints, inputs: tuple[Ints, ...], outputs: tuple[Ints | None, ...]
) -> _Plan | None:
    """The launch for tensors of ``shape`` and these strides; None where they are empty.

    Raises:
        ValueError: the leading dimensions of an output do not collapse.
    """
    if 0 in shape:
        return None
    copied: tuple[bool, ...] = ()
    if all(strides is None or is_dense(tuple(range(len(shape))), shape, strides) for strides in inputs + outputs):
        rows, columns = 1, math.prod(shape)
        strides: list[int] = [0, 1] * len(inputs + outputs)
    else:
        columns = shape[-1]
        rows = math.prod(shape[:-1])
        strides = []
        copies = []
        for of_input in inputs:
            row = matrix_stride(shape, of_input)
            copies.append(row is None)
            strides += [columns, 1] if row is None else [row, of_input[-1]]
        for of_output in outputs:
            if of_output is None:
                strides += [0, 1]
                continue
            row = matrix_stride(shape, of_output)
            if row is None:
                raise ValueError(f"leading dimensions of an output must collapse: {tuple(shape)}, strides {of_output}")
            strides += [row, of_output[-1]]
        copied = tuple(copies) if any(copies) else ()
    tile = _choose_tile(columns)
    column_blocks = triton.cdiv(columns, tile.block)
    plan = Plan.of(
        kernel,
        (rows * column_blocks,),
        (columns, column_blocks, *strides),
        tile.num_warps,
        ACTIVATION=activation,
        BLOCK=tile.block,
    )
    return _Plan(plan, copied)
