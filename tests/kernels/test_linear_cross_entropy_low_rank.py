"""Linear + cross-entropy with a low-rank term, as a head with an adapter has: exactness, gradients, memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.linear_cross_entropy import LowRank, Reduction, linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import (
    EPILOGUES,
    RANK,
    assert_as_exact,
    compute_in_forward,
    differentiate,
    draw_labels,
    exactness_draw,
    interpreted,
    oracle,
    skip_if_not_rounded,
    stock,
)
from tests.kernels.watch import Watch

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

TERMS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("mixed", [False, True], ids=["one_rms", "mixed_rms"])
@pytest.mark.parametrize("how", ["mean", "sum_over_items", "none_weighted"])
@pytest.mark.parametrize(("dtype", "term"), TERMS, ids=str)
def test_low_rank_terms_as_exact_as_stock(
    dtype: torch.dtype, term: torch.dtype, how: str, mixed: bool, backend: Backend, device: torch.device
) -> None:
    """https://github.com/huggingface/trl/issues/4612: the adapter of the head was neither used nor trained."""
    skip_if_not_rounded(backend, dtype, device)
    others = mixed or how != "none_weighted" or (dtype, term) != (torch.float32, torch.bfloat16)
    if interpreted(backend, device) and others:
        pytest.skip("interpreted, each takes a minute; the term's products are PyTorch's on both backends")
    ours_only = {"chunk_bytes": 5 * 320 * dtype.itemsize}  # chunks of 5 and 3 rows
    draw = exactness_draw(
        dtype, device, how, mixed, backend, (8, 32, 257), ours_only, term=term, epilogue=EPILOGUES["cast"]
    )
    assert_as_exact(draw, dtype, f"{backend} {dtype} {term} {how}")


@pytest.mark.parametrize("term", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["mean", "mean_scaled", "sum_over_items"])
def test_gradients_in_the_forward_as_exact_as_stock(
    how: str, term: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_forward(monkeypatch)
    draw = exactness_draw(
        torch.bfloat16, torch.device("cpu"), how, False, "torch", (6, 32, 257), term=term, epilogue=EPILOGUES["scale"]
    )
    assert_as_exact(draw, torch.bfloat16, f"{how} {term}")


def test_a_term_that_rounds_d_logits_sees_the_loss_scale(backend: Backend, device: torch.device) -> None:
    """A float16 adapter on a float32 head: d logits of 1e-9 are nothing in float16, and times 65536 they are not."""
    hidden, weight = torch.zeros(4, 2, device=device), torch.zeros(8192, 2, device=device)
    u, b = torch.ones(4, 1, device=device).half(), torch.zeros(8192, 1, device=device).half()
    b[0] = 12.0
    labels = torch.zeros(4, dtype=torch.int64, device=device)

    def ours(u: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(u, b, 1.0), backend=backend)

    def reference(u: Tensor, b: Tensor) -> Tensor:
        return oracle(hidden.double(), weight.double(), labels, low_rank=LowRank(u, b, 1.0))

    got, want = differentiate(ours, 65536.0, u, b), differentiate(reference, 65536.0, u.double(), b.double())
    assert (got[2] != 0).all()
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for_of_a_low_rank_term(
    reduction: Reduction, trains: tuple[bool, ...], backend: Backend, device: torch.device
) -> None:
    count, width, vocabulary = 6, 3, 70
    weight, labels = torch.randn(vocabulary, width).to(device), draw_labels(count, vocabulary, ignored=0.2).to(device)
    operands = [torch.randn(count, width), torch.randn(count, RANK), torch.randn(vocabulary, RANK)]
    leaves = [t.to(device).requires_grad_(needs) for t, needs in zip(operands, trains, strict=True)]
    hidden, low_rank = leaves[0], LowRank(leaves[1], leaves[2], 0.7)
    options: dict[str, Any] = {"low_rank": low_rank, "reduction": reduction}
    with Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend, **options).sum()
        if any(trains):
            loss.backward()
    again = reduction == "none" and any(trains)
    assert watch.products.count((count, vocabulary)) == 2 * (1 + again)
    expected = stock(hidden, weight, labels, **options).sum()
    torch.testing.assert_close(loss, expected)
    for shape, leaf in zip(((count, width), (count, RANK), (vocabulary, RANK)), leaves, strict=True):
        assert watch.products.count(shape) == leaf.requires_grad
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            (gradient,) = torch.autograd.grad(expected, leaf, retain_graph=True)
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("term", [torch.bfloat16, torch.float32], ids=str)
def test_logits_with_a_low_rank_term_never_exist_as_a_whole(term: torch.dtype, device: torch.device) -> None:
    count, vocabulary, budget = 512, 4096, 2**18
    hidden = torch.randn(count, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 8, device=device, dtype=torch.bfloat16)
    u, b = (torch.randn(n, 4, device=device, dtype=term, requires_grad=True) for n in (count, vocabulary))
    labels = draw_labels(count, vocabulary).to(device)
    for reduction in ("mean", "none"):
        with Watch() as watch:
            options: dict[str, Any] = {"low_rank": LowRank(u, b, 2.0), "reduction": reduction, "chunk_bytes": budget}
            linear_cross_entropy(hidden, weight, labels, **options).sum().backward()
        assert watch.largest <= 2 * budget  # the rows in float32
