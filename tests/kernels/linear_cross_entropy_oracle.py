"""Linear + cross-entropy as its definition has it, as stock computes it, and draws that compare a kernel with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slothplug.kernels.linear_cross_entropy as module
from slothplug.exactness import OP_DRAWS, Exactness
from slothplug.kernels import logit_chunks
from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.kernels.linear_cross_entropy import LowRank, Reduction, linear_cross_entropy

IGNORED = -100
RANK = 5
EPILOGUES: dict[str, tuple[EpilogueStep, ...]] = {
    "none": (),
    "cast": (("cast", torch.float32),),
    "softcap": (("div", 3.0), ("tanh", None), ("mul", 3.0), ("cast", torch.float32)),
    "scale": (("mul", 0.0625), ("cast", torch.float32)),
    "divide": (("cast", torch.float32), ("div", 1.3), ("mul", 0.7)),
}


def apply_steps(logits: Tensor, steps: Sequence[EpilogueStep], cast: bool = True) -> Tensor:
    for name, value in steps:
        if name == "mul":
            logits = logits * value
        elif name == "div":
            logits = logits / value
        elif name == "tanh":
            logits = torch.tanh(logits)
        elif cast:
            logits = logits.to(value)
    return logits


def stock(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    epilogue: Sequence[EpilogueStep] = (),
    **options: Any,
) -> Tensor:
    class_weight = options.pop("class_weight", None)
    logits = F.linear(hidden, weight, bias)
    if low_rank is not None:  # PEFT's order of roundings
        logits = (logits + F.linear(low_rank.u, low_rank.b) * low_rank.scaling).to(logits.dtype)
    logits = apply_steps(logits, epilogue)
    return F.cross_entropy(logits, labels, weight=class_weight, **options)


def oracle(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    epilogue: Sequence[EpilogueStep] = (),
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
) -> Tensor:
    """The definition, in the float64 that the operands come in."""
    vocabulary = weight.shape[0]
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if low_rank is None else logits + low_rank.scaling * (low_rank.u @ low_rank.b.T)
    logits = apply_steps(logits, epilogue, cast=False)
    lse = torch.logsumexp(logits, 1)
    counted = labels != ignore_index
    target = labels.where(counted, 0)
    w = torch.ones(vocabulary, dtype=logits.dtype, device=logits.device)
    w = w if class_weight is None else class_weight.double()
    nll = w[target] * (lse - logits.gather(1, target[:, None])[:, 0])
    loss = (1 - label_smoothing) * nll
    if label_smoothing:
        loss = loss + label_smoothing / vocabulary * (w * (lse[:, None] - logits)).sum(1)
    loss = torch.where(counted, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / w[target].where(counted, 0.0).sum() if reduction == "mean" else loss.sum()


def differentiate(
    function: Callable[..., Tensor], grad_output: Tensor | float, *tensors: Tensor | None
) -> list[Tensor]:
    """The loss, then the gradients of the tensors that are given: hidden, weight, bias, u and b."""
    leaves = [t.detach().requires_grad_() for t in tensors if t is not None]
    loss = function(*leaves)
    grad_output = torch.as_tensor(grad_output, dtype=loss.dtype, device=loss.device).expand(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad_output)]


def draw_labels(count: int, vocabulary: int, generator: torch.Generator | None = None, ignored: float = 0.4) -> Tensor:
    labels = torch.randint(vocabulary, (count,), generator=generator)
    return labels.where(torch.rand(count, generator=generator) >= ignored, IGNORED)


def skip_if_not_rounded(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.bfloat16 and interpreted(backend, device):
        pytest.skip("Triton's interpreter truncates where it stores bfloat16")


Draw = Callable[[int], tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]


def assert_as_exact(draw: Draw, dtype: torch.dtype, context: str = "") -> None:
    """``exactness.assert_as_exact`` for operands of ``dtype``.

    The loss is measured in the unit roundoff of the logits that it was computed from, also where they were cast.
    """
    pool = Exactness()
    for seed in range(OP_DRAWS):
        pool.add(*draw(seed))
    pool.tensors["loss"].dtype = dtype
    pool.check(context)


def assert_close_as_stock(got: list[Tensor], stocks: list[Tensor], want: list[Tensor]) -> None:
    """Energy of the error at most 1.25 times stock's, or 1e-6, tensor by tensor."""
    for mine, theirs, reference in zip(got, stocks, want, strict=True):
        limit = 1.25 * (theirs - reference).norm() + 1e-6 * reference.norm()
        assert (mine - reference).norm() <= limit


def interpreted(backend: Backend, device: torch.device) -> bool:
    return backend == "triton" and device.type == "cpu"


# The reduction, and what a trainer does to its loss.
HOW: dict[str, tuple[Reduction, Callable[[Tensor, float], Tensor]]] = {
    "mean": ("mean", lambda loss, items: loss),
    "mean_scaled": ("mean", lambda loss, items: loss * 0.3),
    "sum_over_items": ("sum", lambda loss, items: loss / items),
    "none_weighted": ("none", lambda loss, items: (loss * torch.linspace(0, 2, loss.numel()).to(loss)).sum()),
}


def exactness_draw(
    dtype: torch.dtype,
    device: torch.device,
    how: str,
    mixed: bool,
    backend: Backend,
    sizes: tuple[int, int, int] = (12, 32, 257),
    ours_only: dict[str, Any] | None = None,
    term: torch.dtype | None = None,
    **options: Any,
) -> Draw:
    """A draw for ``assert_as_exact``: rows of rms 1e-3, 1 and 1e3 where ``mixed``, else logits of size 2.

    With ``term``, a low-rank term of that dtype as large as the product itself.
    """
    reduction, finish = HOW[how]
    count, width, vocabulary = sizes

    def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        rms = torch.tensor([1e-3, 1.0, 1e3])[torch.randint(3, (count, 1), generator=generator)] if mixed else 1.0
        hidden = torch.randn(count, width, generator=generator) * rms
        weight = torch.randn(vocabulary, width, generator=generator) * ((4e-3 if mixed else 2.0) / width**0.5)
        bias = torch.randn(vocabulary, generator=generator) * 0.1
        labels = draw_labels(count, vocabulary, generator).to(device)
        items = float(torch.randint(count, 5 * count, (), generator=generator))
        tensors = [t.to(device, dtype) for t in (hidden, weight, bias)]
        if term is not None:
            u = torch.randn(count, RANK, generator=generator) * rms
            factor = torch.randn(vocabulary, RANK, generator=generator) * ((4e-3 if mixed else 2.0) / RANK**0.5 / 0.7)
            tensors += [t.to(device, term) for t in (u, factor)]

        def named(function: Callable[..., Tensor], operands: list[Tensor], **extra: Any) -> dict[str, Tensor]:
            def call(h: Tensor, w: Tensor, b: Tensor, *low: Tensor) -> Tensor:
                if low:
                    extra["low_rank"] = LowRank(*low, 0.7)
                return finish(function(h, w, labels, bias=b, reduction=reduction, **options, **extra), items)

            names = ("loss", "d_hidden", "d_weight", "d_bias", "d_u", "d_b")[: 1 + len(operands)]
            return dict(zip(names, differentiate(call, 1.0, *operands), strict=True))

        ours = named(linear_cross_entropy, tensors, backend=backend, **(ours_only or {}))
        return ours, named(stock, tensors), named(oracle, [t.double() for t in tensors])

    return draw


def compute_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does in bfloat16: gradients in the forward, kept in float32; its float32 product is emulated."""

    def matmul_out(left: Tensor, right: Tensor, out: Tensor, scaling: float = 1.0) -> None:
        out.copy_(scaling * (left.float() @ right.float()))

    monkeypatch.setattr(module, "_exact_in_forward", lambda hidden, b: True)
    monkeypatch.setattr(logit_chunks, "matmul_out", matmul_out)
