"""RMSNorm: y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps), statistics in float32.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. The two casting orders are those in which
models were trained; with n = x * rstd in float32 they are

    before_weight   y = n.to(x.dtype) * (weight + offset)               the product's dtype is torch's promotion
    after_weight    y = (n * (weight.float() + offset)).to(x.dtype)     Gemma: offset 1, added in float32

Backward, with g the gradient of y and w the weight as the forward multiplied by it:

    dx      = rstd * (g w - n * mean(g w n))
    dweight = sum over rows of g n

Cost for [N, H] of e bytes an element: forward reads x and writes y, 2 N H e bytes; backward reads x and the gradient
and writes dx, 3 N H e bytes; both with about 4 N H and 8 N H flops, so memory bandwidth is the limit. ``dweight`` adds
float32 partial rows, 8 P H bytes for P <= 768 partial sums. Kept for backward: x, weight and 4 N bytes of rstd.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.once_differentiable import once_differentiable

Casting = Literal["before_weight", "after_weight"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Variant(NamedTuple):
    """What tells one RMSNorm from another, apart from its tensors."""

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
        backend: who computes, "torch" or "triton".

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
    primitives = primitives_on(backend, _TorchPrimitives, "rms_norm")
    output: torch.Tensor = _RMSNorm.apply(x, weight, Variant(eps, offset, casting), primitives)
    return output


def output_dtype(x: torch.Tensor, weight: torch.Tensor | None, casting: Casting) -> torch.dtype:
    """The dtype that ``rms_norm`` returns."""
    if weight is None or casting == "after_weight":
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _dtype_of(weight: torch.Tensor | None) -> str:
    return "no weight" if weight is None else f"a weight of {weight.dtype}"


class Primitives(Protocol):
    """What a backend implements. ``rstd`` is the backend's own: float32, one value a row."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor | None, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and rstd."""

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        variant: Variant,
        needs: tuple[bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the gradients of x and weight, each where ``needs`` asks for it."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, variant: Variant, primitives: Primitives
    ) -> torch.Tensor:
        y, rstd = primitives.forward(x, weight, variant)
        ctx.save_for_backward(x, weight, rstd)
        ctx.variant, ctx.primitives = variant, primitives
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        grad_x, grad_weight = ctx.primitives.backward(grad_output, x, weight, rstd, ctx.variant, needs)
        return grad_x, grad_weight, None, None


class _TorchPrimitives:
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor | None, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + variant.eps)
        n = x32 * rstd
        if weight is None:
            return n.to(x.dtype), rstd
        scale = _scale(weight, variant)
        return (n.to(x.dtype) * scale if variant.casting == "before_weight" else (n * scale).to(x.dtype)), rstd

    @staticmethod
    def backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        variant: Variant,
        needs: tuple[bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        g, n = grad_output.float(), x.float() * rstd
        grad_x = grad_weight = None
        if needs[1] and weight is not None:
            grad_weight = (g * n).flatten(0, -2).sum(0).to(weight.dtype) if g.ndim > 1 else (g * n).to(weight.dtype)
        if needs[0]:
            gw = g if weight is None else g * _scale(weight, variant)
            projection = (gw * n).mean(-1, keepdim=True)
            grad_x = (gw - n.mul_(projection)).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight


def _scale(weight: torch.Tensor, variant: Variant) -> torch.Tensor:
    """What the rows are multiplied by: in the weight's dtype before the weight, in float32 after it."""
    weight = weight if variant.casting == "before_weight" else weight.float()
    return weight + variant.offset if variant.offset else weight
