"""Gated linear unit: out = act(gate) * up, from two tensors or from one packed tensor.

With s = sigmoid(z), every activation but ``relu``, ``relu2`` and ``gelu`` is one formula:

    sigmoid      act = s                  z = x
    silu         act = x s                z = x
    quick_gelu   act = x s                z = 1.702 x
    gelu_tanh    act = x s                z = 2 sqrt(2 / pi) (x + 0.044715 x^3), since (1 + tanh(k)) / 2 = sigmoid(2 k)
    gelu         act = x Phi(x)           Phi(x) = (1 + erf(x / sqrt(2))) / 2
    relu, relu2  act = max(x, 0), max(x, 0)^2

    grad_up = g act(gate)                 grad_gate = g up act'(gate)          g the gradient of out

Sources: Shazeer 2020, "GLU Variants Improve Transformer"; Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".

Memory traffic for n output elements: forward 3 n elements (reads gate, up; writes out), backward 5 n (reads g, gate,
up; writes grad_gate, grad_up). Some 10 flops an element forward and 20 backward, so both are bound by memory. Only gate
and up are kept for backward; act(gate) is recomputed from them.

Precision: everything is computed in float32 and rounded once. The stock expression rounds act(gate) to the input's
dtype before it multiplies, and g * up before it multiplies by act'(gate). These roundings are not reproduced. Without
them the root-mean-square error against float64 (normal draws, half precision) is 0.63 to 0.72 times stock's for out and
grad_up and 0.45 to 0.72 times for grad_gate; relu, which has no first rounding to save, equals stock bit for bit.
A float16 product overflows only where the exact one does: gate = up = 200 gives 40000; 300 gives inf, as stock; with
relu2, gate = 300 and up = 0.5 give 45000, where stock's intermediate 90000 is inf already. The one exception: where
65520 <= |act(gate) up| < 65552 the exact value rounds to inf, and stock is finite if its first rounding went down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.once_differentiable import once_differentiable

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "quick_gelu"]
Layout = Literal["gate_up", "up_gate", "interleaved"]

FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
"""act(x) in x's dtype, a new tensor."""

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
LAYOUTS: tuple[str, ...] = get_args(Layout)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def glu(gate: Tensor, up: Tensor, *, activation: Activation, backend: Backend = "torch") -> Tensor:
    """Returns act(gate) * up, a new contiguous tensor of the inputs' shape and dtype.

    Args:
        gate, up: [..., I], same shape, dtype and device; float32, bfloat16 or float16; any strides. Rows that are
            strided, as the halves of a packed tensor are, are read in place.
        activation: one of ``ACTIVATIONS``.
        backend: ``"triton"`` or ``"torch"``.

    Differentiable once in gate and up. A gradient that is not asked for is neither computed nor allocated.

    Raises:
        TypeError: gate and up differ in dtype, or their dtype is not one of the three.
        ValueError: gate and up differ in shape or device, or the activation or the backend is unknown.
    """
    _check(gate, up, activation)
    return _GLU.apply(gate, up, activation, primitives(backend))


def glu_packed(gate_up: Tensor, *, activation: Activation, layout: Layout, backend: Backend = "torch") -> Tensor:
    """Returns act(gate) * up, a new contiguous [..., I] tensor, from gate and up in one [..., 2 I] tensor.

    ``layout`` is their arrangement in the last dimension: ``"gate_up"`` and ``"up_gate"`` are halves, in that order;
    ``"interleaved"`` has gate at the even and up at the odd indices. Both are read without a copy, and the gradient is
    written to one [..., 2 I] buffer. Otherwise as ``glu``.

    Raises:
        TypeError: the dtype is not float32, bfloat16 or float16.
        ValueError: the last dimension is odd, or the activation, the layout or the backend is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"a packed tensor holds gate and up, so its last dimension is even; got {tuple(gate_up.shape)}"
        )
    _check(*split_packed(gate_up, layout), activation)
    return _PackedGLU.apply(gate_up, activation, layout, primitives(backend))


def split_packed(gate_up: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Views (gate, up), each [..., I], of a packed [..., 2 I] tensor."""
    if layout == "interleaved":
        return gate_up[..., 0::2], gate_up[..., 1::2]
    first, second = gate_up.chunk(2, dim=-1)
    return (first, second) if layout == "gate_up" else (second, first)


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if gate.dtype != up.dtype:
        raise TypeError(f"gate and up must have one dtype; gate is {gate.dtype}, up is {up.dtype}")
    if gate.dtype not in DTYPES:
        raise TypeError(f"glu computes in float32 and takes float32, bfloat16 or float16; got {gate.dtype}")
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape; gate is {tuple(gate.shape)}, up is {tuple(up.shape)}")
    if gate.device != up.device:
        raise ValueError(f"gate and up must be on one device; gate is on {gate.device}, up on {up.device}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")


class Primitives:
    """The mathematics without autograd, checks and allocations, in PyTorch; Triton's class has the same functions.

    Tensors are [..., I] of one shape. Inputs have any strides; destinations have leading dimensions that collapse into
    one. Dtypes are those of ``glu``.
    """

    @staticmethod
    def forward(gate: Tensor, up: Tensor, activation: Activation, out: Tensor) -> None:
        """Writes act(gate) * up into ``out``, which may be gate or up."""
        torch.mul(_activate(gate.float(), activation), up, out=out)

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
        """Writes the gradients into those of ``grad_gate`` and ``grad_up`` that are given.

        Either may be grad_output, gate or up.
        """
        gate_float = gate.float()
        written = []
        if grad_gate is not None:
            written.append((grad_gate, _activation_backward(grad_output.float() * up, gate_float, activation)))
        if grad_up is not None:
            written.append((grad_up, _activate(gate_float, activation) * grad_output))
        for destination, value in written:  # after everything is read, since a destination may be an input
            destination.copy_(value)


def primitives(backend: Backend) -> type[Primitives]:
    """The functions of ``backend``."""
    return primitives_on(backend, Primitives, "glu")


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, primitives: type[Primitives]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.primitives = activation, primitives
        out = _empty(gate)
        ctx.primitives.forward(gate, up, activation, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        grad_gate = _empty(gate) if needs_gate else None
        grad_up = _empty(up) if needs_up else None
        ctx.primitives.backward(grad_output, gate, up, ctx.activation, grad_gate=grad_gate, grad_up=grad_up)
        return grad_gate, grad_up, None, None


class _PackedGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, activation: Activation, layout: Layout, primitives: type[Primitives]
    ) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.layout, ctx.primitives = activation, layout, primitives
        gate, up = split_packed(gate_up, layout)
        out = _empty(gate)
        ctx.primitives.forward(gate, up, activation, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = split_packed(gate_up, ctx.layout)
        grad_gate_up = _empty(gate_up)
        grad_gate, grad_up = split_packed(grad_gate_up, ctx.layout)
        ctx.primitives.backward(grad_output, gate, up, ctx.activation, grad_gate=grad_gate, grad_up=grad_up)
        return grad_gate_up, None, None, None


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    """act(x) for float32 x, a new tensor; in place where the formula's own intermediate results cost time."""
    if activation == "relu2":
        return x.relu().square_()
    if activation == "quick_gelu":
        return torch.sigmoid(1.702 * x).mul_(x)
    return FORMULAS[activation](x)


def _activation_backward(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """grad * act'(x) for float32 grad and x; exactly 0 where relu is flat, also for an infinite grad."""
    aten = torch.ops.aten
    match activation:
        case "silu":
            return aten.silu_backward(grad, x)
        case "gelu":
            return aten.gelu_backward(grad, x)
        case "gelu_tanh":
            return aten.gelu_backward(grad, x, approximate="tanh")
        case "relu":
            return aten.threshold_backward(grad, x, 0)
        case "relu2":
            return aten.threshold_backward(grad * x * 2, x, 0)
        case "sigmoid":
            return aten.sigmoid_backward(grad, x.sigmoid())
        case "quick_gelu":
            s = torch.sigmoid(1.702 * x)
            return grad * s * (1 + 1.702 * x * (1 - s))
