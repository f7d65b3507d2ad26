"""Rows whose label is ignored, on both backends: they take part in no product, have no loss and zero gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.linear_cross_entropy import LowRank, Reduction, linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import IGNORED, differentiate, stock
from tests.kernels.watch import Watch

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def test_ignored_rows_take_part_in_no_product(backend: Backend, device: torch.device) -> None:
    hidden, weight = torch.randn(8, 3).to(device), torch.randn(70, 3).to(device)
    labels = torch.tensor([IGNORED, 3, IGNORED, IGNORED, 69, 0, IGNORED, IGNORED]).to(device)

    def run(max_valid: int | None, reduction: Reduction) -> list[Tensor]:
        return differentiate(
            lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, max_valid=max_valid, backend=backend),
            0.7,
            hidden,
            weight,
        )

    for reduction in ("mean", "sum", "none"):
        with Watch() as watch:
            dropped = run(3, reduction)
        assert {shape[0] for shape in watch.products} == {3, 70}
        for mine, reference in zip(dropped, run(None, reduction), strict=True):
            torch.testing.assert_close(mine, reference)
        assert (dropped[1][labels == IGNORED] == 0).all()
        with Watch() as watch:
            with_room = run(5, reduction)
        assert {shape[0] for shape in watch.products} == {5, 70}
        for mine, reference in zip(with_room, run(None, reduction), strict=True):
            torch.testing.assert_close(mine, reference)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="max_valid is 2, and 3 labels are not -100"):
            run(2, "mean")
    else:
        assert all(value.isnan().any() for value in run(2, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_valid", [None, 0])
def test_all_labels_ignored(max_valid: int | None, dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/177; a loss over no items has an upstream gradient of inf."""
    hidden, weight = torch.randn(5, 3).to(device, dtype), torch.randn(70, 3).to(device, dtype)
    u, b = torch.randn(5, 2).to(device, dtype), torch.randn(70, 2).to(device, dtype)
    labels = torch.full((5,), IGNORED, device=device)
    for reduction, upstream in itertools.product(("mean", "sum", "none"), (1.0, float("inf"), float("nan"))):

        def call(
            function: Callable[..., Tensor], reduction: str = reduction, upstream: float = upstream, **extra: Any
        ) -> list[Tensor]:
            return differentiate(
                lambda h, w, u, b: function(h, w, labels, low_rank=LowRank(u, b, 2.0), reduction=reduction, **extra),
                upstream,
                hidden,
                weight,
                u,
                b,
            )

        got = call(linear_cross_entropy, max_valid=max_valid, backend=backend)
        for mine, reference in zip(got, call(stock), strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)
        assert all((gradient == 0).all() for gradient in got[1:])


@pytest.mark.parametrize("trains_hidden", [False, True])
def test_ignored_rows_of_a_loss_without_bound(trains_hidden: bool, backend: Backend, device: torch.device) -> None:
    """A loss scale that overflows: rows without a loss have a gradient of zero all the same."""
    hidden, weight = torch.randn(3, 4).to(device).requires_grad_(trains_hidden), torch.randn(7, 4).to(device)
    u, b = torch.randn(3, 2).to(device).requires_grad_(), torch.randn(7, 2).to(device)
    labels = torch.tensor([1, IGNORED, 2]).to(device)
    loss = linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(u, b, 2.0), backend=backend)
    loss.backward(torch.tensor(float("inf"), device=device))
    for leaf in (u, hidden) if trains_hidden else (u,):
        assert (leaf.grad[1] == 0).all()
        assert not leaf.grad[0].isfinite().any()
