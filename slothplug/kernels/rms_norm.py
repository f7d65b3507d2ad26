"""RMSNorm: y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps), statistics in float32.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The two casting orders are those in which
models were trained; with n = x * rstd in float32 they are

    before_weight   y = n.to(x.dtype) * (weight + offset)               the product's dtype is torch's promotion
    after_weight    y = (n * (weight.float() + offset)).to(x.dtype)     Gemma: offset 1, added in float32

Backward, with g the gradient of y and w the weight as the forward multiplied by it:

    grad_x      = rstd * (g w - n * mean(g w n))
    grad_weight = sum over rows of g n

With a residual, h = x + residual is added and rounded first, as the unfused model does, and y is the norm of the
rounded h. h has another reader, the next residual: its gradient is that reader's plus the norm's, and is x's and the
residual's alike.

Cost for [N, H] of e bytes an element: forward reads x and writes y, 2 N H e bytes, with a residual 4 N H e (the add and
the norm apart: 5 N H e); backward reads x and the gradient and writes grad_x, 3 N H e bytes, where it accumulates
4 N H e (apart: 6 N H e); with about 4 N H and 8 N H flops, so memory bandwidth is the limit. ``grad_weight`` adds
float32 partial rows, 8 P H bytes for P <= 768 partial sums. Kept for backward: x, weight and 4 N bytes of rstd.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.kernels.row_layout import empty_row_values, empty_rows

Casting = Literal["before_weight", "after_weight"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Variant(NamedTuple):
    """The options of one RMSNorm; see ``rms_norm``."""

    eps: float
    offset: float
    casting: Casting


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    casting: Casting = "before_weight",
    backend: Backend = "torch",
) -> torch.Tensor:
    """Normalises each row of ``x`` by its root mean square, in float32, and scales it.

    Args:
        x: [..., H], float32, float16 or bfloat16, any strides.
        weight: [H], one of the same dtypes, or None for no scale.
        eps: added to the mean square.
        offset: added to the weight: in the weight's dtype for ``before_weight``, in float32 for ``after_weight``.
        casting: where the result is rounded to x's dtype, see above.
        backend: "torch" or "triton".

    Returns:
        [..., H]. Its dtype is x's; with ``before_weight`` and a weight, what torch promotes the two to.
        Rows lie in memory in the order of x's rows. Differentiable once in ``x`` and ``weight``.

    Raises:
        TypeError: a dtype other than the three.
        ValueError: a weight that is not [H], an unknown ``casting`` or ``backend``.
    """
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        raise TypeError(f"rms_norm takes float32, float16 and bfloat16, not {x.dtype} with {_dtype_of(weight)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight of shape {tuple(weight.shape)} cannot scale rows of x, {tuple(x.shape)}")
    if casting not in ("before_weight", "after_weight"):
        raise ValueError(f"casting is 'before_weight' or 'after_weight', not {casting!r}")
    output: torch.Tensor = _RMSNorm.apply(x, weight, Variant(eps, offset, casting), primitives(backend))
    return output


def output_dtype(x_dtype: torch.dtype, weight: torch.Tensor | None, casting: Casting) -> torch.dtype:
    """The dtype that ``rms_norm`` returns."""
    if weight is None or casting == "after_weight" or weight.dtype is x_dtype:
        return x_dtype
    return torch.promote_types(x_dtype, weight.dtype)


def _dtype_of(weight: torch.Tensor | None) -> str:
    return "no weight" if weight is None else f"a weight of {weight.dtype}"


class Primitives:
    """The mathematics without autograd, checks and allocations, in PyTorch; Triton's class has the same functions.

    Tensors are [..., H] of one shape. Inputs have any strides. Destinations have a last dimension of stride 1 and up to
    three outer dimensions, or outer dimensions that collapse into one. ``rstd`` is ``row_layout.empty_row_values`` of
    the tensor that is normalised. Dtypes are those of ``rms_norm``.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor | None, variant: Variant, y: torch.Tensor, rstd: torch.Tensor
    ) -> None:
        """Writes the norm of x into ``y``, which may be x, and 1 / rms into ``rstd``."""
        x32 = x.float()
        rstd_column = torch.rsqrt(x32.square().mean(-1, keepdim=True) + variant.eps)
        rstd.copy_(rstd_column.squeeze(-1))
        n = x32 * rstd_column
        if weight is not None and variant.casting == "before_weight":
            torch.mul(n.to(x.dtype), _weight(weight, variant), out=y)
        else:
            y.copy_(n if weight is None else n * _weight(weight, variant))

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
        """Writes x + residual, rounded, into ``h``, its norm into ``y`` and 1 / rms into ``rstd``.

        ``h`` has the dtype that torch promotes x and the residual to; it may be x or the residual.
        """
        torch.add(x, residual, out=h)
        Primitives.forward(h, weight, variant, y, rstd)

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
        """Writes the gradients that are given.

        Args:
            grad_output: of y.
            x: what was normalised: with a residual, h.
            rstd: the forward's; it may have come back with other strides, as x may.
            grad_x: of x's shape; it may be grad_output. The sum with what is there is rounded once.
            grad_weight: [H], contiguous, overwritten.
            accumulate: adds to ``grad_x`` instead of overwriting it.
        """
        rstd = rstd.unsqueeze(-1)
        g, n = grad_output.float(), x.float() * rstd
        if grad_weight is not None:
            rows = (g * n).flatten(0, -2) if n.ndim > 1 else (g * n).unsqueeze(0)
            grad_weight.copy_(rows.sum(0))
        if grad_x is not None:
            gw = g if weight is None else g * _weight(weight, variant)
            projection = (gw * n).mean(-1, keepdim=True)
            result = (gw - n.mul_(projection)).mul_(rstd)
            grad_x.add_(result) if accumulate else grad_x.copy_(result)


def primitives(backend: Backend) -> type[Primitives]:
    """The functions of ``backend``."""
    return primitives_on(backend, Primitives, "rms_norm")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, variant: Variant, primitives: type[Primitives]
    ) -> torch.Tensor:
        y, rstd = empty_rows(x, output_dtype(x.dtype, weight, variant.casting)), empty_row_values(x)
        primitives.forward(x, weight, variant, y, rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.variant, ctx.primitives = variant, primitives
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        grad_x = empty_rows(x, x.dtype) if needs_x else None
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        ctx.primitives.backward(grad_output, x, weight, rstd, ctx.variant, grad_x=grad_x, grad_weight=grad_weight)
        return grad_x, grad_weight, None, None


def _weight(weight: torch.Tensor, variant: Variant) -> torch.Tensor:
    """The factor of the rows: in the weight's dtype before the weight, in float32 after it."""
    weight = weight if variant.casting == "before_weight" else weight.float()
    return weight + variant.offset if variant.offset else weight
