"""Triton kernels of the gated linear unit; the formulas and the precision are in ``slothplug.kernels.glu``.

One launch a direction. A program serves ``BLOCK`` neighbouring columns of one row; where all tensors are contiguous the
whole problem is one long row, so that no lane idles whatever the row's length. Nothing is reduced: the same input gives
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slothplug.kernels.glu import Activation
from slothplug.kernels.triton.launch import launch


@dataclass(frozen=True)
class Tile:
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
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """act(x) for float32 x."""
    if ACTIVATION == "gelu":
        activated = x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))
    elif ACTIVATION == "relu":
        activated = tl.where(x <= 0, 0.0, x)  # tl.maximum would turn NaN into 0
    elif ACTIVATION == "relu2":
        activated = tl.where(x <= 0, 0.0, x * x)
    elif ACTIVATION == "sigmoid":
        activated = tl.sigmoid(x)
    else:
        z, _ = sigmoid_argument(x, ACTIVATION)
        activated = x * tl.sigmoid(z)
    return activated


@triton.jit
def activate_and_differentiate(x: tl.tensor, grad: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """act(x) and grad * act'(x) for float32 x and grad. The latter is 0 where relu is flat, even if grad is inf."""
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        activated = x * cdf
        grad_x = grad * (cdf + x * density)
    elif ACTIVATION == "relu":
        activated = tl.where(x <= 0, 0.0, x)
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
    tl.store(out + row * out_row + column * out_column, activate(x, ACTIVATION) * y, mask=mask)


@triton.jit
def glu_backward_kernel(
    grad_output: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    d_gate: tl.tensor,
    d_up: tl.tensor,
    columns: tl.tensor,
    column_blocks: tl.tensor,
    grad_row: tl.tensor,
    grad_column: tl.tensor,
    gate_row: tl.tensor,
    gate_column: tl.tensor,
    up_row: tl.tensor,
    up_column: tl.tensor,
    d_gate_row: tl.tensor,
    d_gate_column: tl.tensor,
    d_up_row: tl.tensor,
    d_up_column: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """d_gate and d_up, each where its pointer is not None."""
    row, column, mask = _block(columns, column_blocks, BLOCK)
    grad = tl.load(grad_output + row * grad_row + column * grad_column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column * up_column, mask=mask, other=0.0).to(tl.float32)
    activated, grad_x = activate_and_differentiate(x, grad * y, ACTIVATION)
    if d_gate is not None:
        tl.store(d_gate + row * d_gate_row + column * d_gate_column, grad_x, mask=mask)
    if d_up is not None:
        tl.store(d_up + row * d_up_row + column * d_up_column, grad * activated, mask=mask)


class TritonPrimitives:
    """See ``slothplug.kernels.glu.Primitives``."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: Activation, out: Tensor) -> None:
        _launch(glu_forward_kernel, (gate, up), (out,), activation)

    @staticmethod
    def backward(
        grad_output: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        *,
        d_gate: Tensor | None = None,
        d_up: Tensor | None = None,
    ) -> None:
        _launch(glu_backward_kernel, (grad_output, gate, up), (d_gate, d_up), activation)


def _launch(
    kernel: Any, inputs: Sequence[Tensor], destinations: Sequence[Tensor | None], activation: Activation
) -> None:
    if not inputs[0].numel():
        return
    tensors = (*inputs, *destinations)
    if all(t is None or t.is_contiguous() for t in tensors):
        rows, columns = 1, inputs[0].numel()
        strides: list[int] = [0, 1] * len(tensors)
    else:
        columns = inputs[0].shape[-1]
        rows = inputs[0].numel() // columns
        # reshape copies an input whose leading dimensions do not collapse; a destination must not be a copy.
        tensors = (
            *(t.reshape(-1, columns) for t in inputs),
            *(None if t is None else t.view(-1, columns) for t in destinations),
        )
        strides = [stride for t in tensors for stride in ((0, 1) if t is None else t.stride())]
    tile = _choose_tile(columns)
    column_blocks = triton.cdiv(columns, tile.block)
    arguments = (*tensors, columns, column_blocks, *strides, activation, tile.block)
    launch(kernel, (rows * column_blocks,), inputs[0].device, *arguments, num_warps=tile.num_warps)
