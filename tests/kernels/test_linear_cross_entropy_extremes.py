"""Linear + cross-entropy at the limits of floating point, on both backends: infinite logits, factors of zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import EPILOGUES, IGNORED, compute_in_forward, differentiate, stock

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("steps", [(), (("mul", 0.0625),), (("div", 8.0),), (("mul", 0.1),), EPILOGUES["softcap"][:3]])
def test_infinite_logits(steps: tuple[EpilogueStep, ...], value: float, backend: Backend, device: torch.device) -> None:
    """A bias of -inf on padding tokens, or a half-precision logit that overflows below a soft cap."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16).to(device), torch.randn(10, 16).to(device)
    bias, labels = torch.zeros(10, device=device), torch.tensor([1, 2, 3, IGNORED], device=device)
    bias[9] = value

    def run(function: Callable[..., Tensor], **extra: Any) -> list[Tensor]:
        return differentiate(
            lambda h, w, b: function(h, w, labels, bias=b, epilogue=steps, **extra), 1.0, hidden, weight, bias
        )

    for mine, theirs in zip(run(linear_cross_entropy, backend=backend), run(stock), strict=True):
        # Where the loss is nan stock has nan in the gradients of ignored rows as well.
        torch.testing.assert_close(mine.where(theirs.isfinite(), 0.0), theirs.where(theirs.isfinite(), 0.0))
        assert theirs.isfinite().all() or not mine.isfinite().all()


def test_logits_of_minus_infinity(backend: Backend, device: torch.device) -> None:
    """A vocabulary whose unused tokens are masked, in whole blocks and at its start."""
    hidden, weight = torch.randn(3, 4).to(device), torch.randn(20000, 4).to(device)
    bias = torch.zeros(20000, device=device)
    bias[:9000] = bias[15000:] = float("-inf")
    labels = torch.tensor([9001, 14999, IGNORED]).to(device)
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, bias=bias, backend=backend), 1.0, hidden, weight
    )
    want = differentiate(lambda h, w: stock(h, w, labels, bias=bias), 1.0, hidden, weight)
    for mine, reference in zip(got, want, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)


def test_not_finite_logits_do_not_give_a_finite_loss(backend: Backend, device: torch.device) -> None:
    weight = torch.randn(70, 4).to(device)
    labels = torch.tensor([1, 2]).to(device)
    for value in (float("nan"), float("inf")):
        hidden = torch.ones(2, 4, device=device)
        hidden[0, 0] = value
        loss = linear_cross_entropy(hidden, weight, labels, reduction="none", backend=backend)
        assert loss.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("factors", [(0.0,), (1e-200, 1e-200)])
def test_a_factor_of_zero(factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_forward(monkeypatch)
    hidden, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(9, 8, dtype=torch.bfloat16)
    labels, steps = torch.tensor([1, 2, 3, 4]), tuple(("mul", factor) for factor in factors)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, epilogue=steps), 1.0, hidden, weight)
    want = differentiate(lambda h, w: stock(h, w, labels, epilogue=steps), 1.0, hidden, weight)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0)


def test_class_weights_that_sum_to_zero(backend: Backend, device: torch.device) -> None:
    hidden, weight = torch.randn(2, 3).to(device), torch.randn(4, 3).to(device)
    labels, class_weight = torch.tensor([1, 2]).to(device), torch.tensor([1.0, 0.0, 0.0, 1.0]).to(device)
    for reduction in ("mean", "sum"):
        options: dict[str, Any] = {"class_weight": class_weight, "reduction": reduction}
        got = differentiate(
            lambda h, w, o=options: linear_cross_entropy(h, w, labels, backend=backend, **o), 1.0, hidden, weight
        )
        want = differentiate(lambda h, w, o=options: stock(h, w, labels, **o), 1.0, hidden, weight)
        for mine, reference in zip(got, want, strict=True):
            torch.testing.assert_close(mine, reference, equal_nan=True)
