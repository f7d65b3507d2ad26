"""Entropy and most likely token of every row, written with the loss; and losses of impossible tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import RowStatistics
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import EPILOGUES, IGNORED, apply_steps, differentiate, draw_labels

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def entropy(logits: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.double(), 1)
    return -(log_p.exp() * log_p).sum(1)


def with_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any
) -> tuple[list[torch.Tensor], RowStatistics]:
    """Loss and gradients; and the statistics."""
    found = RowStatistics.empty(len(labels), labels.device)

    def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(h, w, labels, statistics=found, **options)

    return differentiate(loss, 0.7, hidden, weight), found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_statistics_are_those_of_the_logits(data: st.DataObject, backend: Backend, device: torch.device) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    rows, vocabulary = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 7, 64, 257, 700]))
    ignore_index = data.draw(st.sampled_from([IGNORED, 0, vocabulary]))
    options: dict[str, Any] = {
        "epilogue": EPILOGUES[data.draw(st.sampled_from(list(EPILOGUES)))],
        "reduction": data.draw(st.sampled_from(["mean", "sum"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1])),
        "ignore_index": ignore_index,
        "chunk_bytes": data.draw(st.sampled_from([1, 2**20])),
        "backend": backend,
    }
    labels = torch.randint(vocabulary, (rows,)).where(torch.rand(rows) < 0.6, ignore_index).to(device)
    # Rows of integers share their largest logit with others: the first is the answer.
    hidden = torch.where(torch.rand(rows, 1) < 0.5, torch.randint(-2, 3, (rows, 5)).float(), torch.randn(rows, 5))
    weight = torch.randint(-2, 3, (vocabulary, 5)).float()
    hidden, weight = hidden.to(device), weight.to(device)
    without = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, **options), 0.7, hidden, weight)
    got, found = with_statistics(hidden, weight, labels, max_valid=int((labels != ignore_index).sum()), **options)
    for mine, reference in zip(got, without, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6, equal_nan=True)
    logits = apply_steps(hidden @ weight.T, options["epilogue"])
    torch.testing.assert_close(found.entropy.double(), entropy(logits), rtol=1e-5, atol=2e-6)
    assert torch.equal(found.argmax, logits.argmax(1))


@pytest.mark.parametrize("vocabulary", [65537, 151936])
def test_long_rows(vocabulary: int, backend: Backend, device: torch.device) -> None:
    torch.manual_seed(0)
    # Integers: sums of them are exact in any order, so that equal logits are equal.
    hidden, weight = (torch.randint(-3, 4, shape).to(device).float() for shape in ((4, 8), (vocabulary, 8)))
    weight[40000] = weight[vocabulary - 1] = 2 * hidden[1]
    labels = torch.tensor([1, IGNORED, vocabulary - 1, 5], device=device)
    _, found = with_statistics(hidden, weight, labels, backend=backend)
    logits = hidden @ weight.T
    torch.testing.assert_close(found.entropy.double(), entropy(logits), rtol=1e-5, atol=2e-6)
    assert torch.equal(found.argmax, logits.argmax(1))
    assert found.argmax[1] == 40000


def test_an_impossible_token(backend: Backend, device: torch.device) -> None:
    """As in PyTorch: an infinite loss for the token itself and with smoothing, 0 log 0 = nan in the entropy."""
    hidden = torch.tensor([[1.0, 0.5]], device=device)
    weight = torch.tensor([[-math.inf, 0.0], [1.0, 0.2], [0.3, 0.1]], device=device)
    for label, smoothing in ((0, 0.0), (0, 0.1), (1, 0.0), (1, 0.1)):
        labels = torch.tensor([label], device=device)
        found = RowStatistics.empty(1, device)
        loss = linear_cross_entropy(
            hidden, weight, labels, label_smoothing=smoothing, statistics=found, backend=backend
        )
        expected = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=smoothing)
        torch.testing.assert_close(loss, expected)
        assert found.argmax.item() == 1
        assert found.entropy.isnan().item()


def test_statistics_of_an_evaluation(backend: Backend, device: torch.device) -> None:
    hidden, weight = torch.randn(6, 8).to(device), torch.randn(33, 8).to(device)
    labels = draw_labels(6, 33).to(device)
    found = RowStatistics.empty(6, device)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, statistics=found, backend=backend)
    torch.testing.assert_close(found.entropy.double(), entropy(hidden @ weight.T), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        RowStatistics(torch.empty(3), torch.empty(4, dtype=torch.int64)),
        RowStatistics(torch.empty(4, dtype=torch.float64), torch.empty(4, dtype=torch.int64)),
        RowStatistics(torch.empty(4), torch.empty(4, dtype=torch.int32)),
        RowStatistics(torch.empty(8)[::2], torch.empty(4, dtype=torch.int64)),
        RowStatistics(torch.empty(4, device="meta"), torch.empty(4, dtype=torch.int64)),
    ],
)
def test_refusals(wrong: RowStatistics) -> None:
    with pytest.raises(ValueError, match=r"statistics\.(entropy|argmax) is \[N\] = \(4,\)"):
        linear_cross_entropy(torch.randn(4, 2), torch.randn(5, 2), torch.zeros(4, dtype=torch.int64), statistics=wrong)
