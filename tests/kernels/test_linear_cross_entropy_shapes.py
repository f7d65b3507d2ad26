"""Linear + cross-entropy of any shape, strides and options, and of every vocabulary, on both backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.linear_cross_entropy import LowRank, linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import (
    EPILOGUES,
    IGNORED,
    assert_close_as_stock,
    differentiate,
    draw_labels,
    interpreted,
    oracle,
    stock,
)

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@st.composite
def strided(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """A function that gives a tensor other strides and keeps its values."""
    kind = draw(st.sampled_from(["contiguous", "wider", "every_other", "transposed"]))

    def lay(x: Tensor) -> Tensor:
        if kind == "wider":
            return torch.cat((x, x), -1)[..., x.shape[-1] :]
        if kind == "every_other":
            return torch.stack((x, x), -1)[..., 1]
        return x.t().contiguous().t() if kind == "transposed" and x.ndim == 2 else x

    return lay


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_strides_and_options(data: st.DataObject, backend: Backend, device: torch.device) -> None:
    count, width = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))
    vocabulary = data.draw(st.integers(1, 70))
    ignore_index = data.draw(st.sampled_from([IGNORED, 0, vocabulary]))
    labels = torch.randint(vocabulary, (count,))
    labels = labels.where(torch.rand(count) < 0.6, ignore_index).to(device)
    hidden, weight = torch.randn(count, width).to(device), torch.randn(vocabulary, width).to(device)
    bias = torch.randn(vocabulary).to(device) if data.draw(st.booleans()) else None
    rank = data.draw(st.sampled_from([None, 1, 3]))
    term = [] if rank is None else [torch.randn(count, rank).to(device), torch.randn(vocabulary, rank).to(device)]
    scaling = data.draw(st.sampled_from([1.0, -0.6]))
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "class_weight": torch.rand(vocabulary).to(device) if data.draw(st.booleans()) else None,
        "epilogue": EPILOGUES[data.draw(st.sampled_from(list(EPILOGUES)))],
    }
    spare = data.draw(st.sampled_from([None, 0, 1, 3]))
    max_valid = None if spare is None else int((labels != ignore_index).sum()) + spare
    lays = [data.draw(strided()) for _ in range(6)]

    def split(others: tuple[Tensor, ...], lays: Sequence[Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        low = [lay(t) for lay, t in zip(lays, others[-2:], strict=False)] if term else None
        return {
            "bias": others[0] if bias is not None else None,
            "low_rank": LowRank(*low, scaling) if low is not None else None,
        }

    def ours(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return linear_cross_entropy(
            lays[0](h),
            lays[1](w),
            lays[2](labels),
            **split(others, lays[4:]),
            max_valid=max_valid,
            chunk_bytes=data.draw(st.sampled_from([1, 1024, 2**20])),
            backend=backend,
            **options,
        )

    grad_output = lays[3](torch.randn(count if options["reduction"] == "none" else 1).to(device))
    grad_output = grad_output if options["reduction"] == "none" else grad_output[0]
    tensors = [t for t in (hidden, weight, bias, *term) if t is not None]
    got = differentiate(ours, grad_output, *tensors)
    doubles = [t.double() for t in tensors]

    def reference_of(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return oracle(h, w, labels, **split(others, [lambda t: t] * 2), **options)

    want = differentiate(reference_of, grad_output.double(), *doubles)
    for mine, reference in zip(got, want, strict=True):
        reference = reference if (labels != ignore_index).any() or mine is got[0] else torch.zeros_like(reference)
        torch.testing.assert_close(mine, reference.float(), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 257, 65535, 65536, 65537, 128256, 151936, 262208])
def test_vocabularies(vocabulary: int, backend: Backend, device: torch.device) -> None:
    """https://github.com/unslothai/unsloth/issues/19: beyond 65536 lanes a kernel refused to launch."""
    torch.manual_seed(vocabulary)
    hidden, weight = torch.randn(3, 4).to(device), torch.randn(vocabulary, 4).to(device)
    labels = torch.tensor([vocabulary - 1, IGNORED, vocabulary // 2]).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, hidden, weight)
    stocks = differentiate(lambda h, w: stock(h, w, labels), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels), 1.0, hidden.double(), weight.double())
    assert_close_as_stock(got, stocks, want)


@pytest.mark.parametrize("count", [0, 1, 7, 4097])
def test_token_counts(count: int, backend: Backend, device: torch.device) -> None:
    if count > 7 and interpreted(backend, device):
        pytest.skip("one program a row, and the interpreter takes milliseconds for each")
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, 3).to(device), torch.randn(5, 3).to(device)
    labels = draw_labels(count, 5).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels), 1.0, hidden.double(), weight.double())
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine, reference.float(), equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1, 257, 65535, 65536, 65537, 128256, 151936, 262208])
@pytest.mark.parametrize("count", [0, 1, 7, 4097])
def test_every_vocabulary_with_every_token_count(count: int, vocabulary: int, device: torch.device) -> None:
    torch.manual_seed(count + vocabulary)
    hidden, weight = torch.randn(count, 16, device=device), torch.randn(vocabulary, 16, device=device)
    labels = draw_labels(count, vocabulary).to(device)
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, reduction="sum", backend="triton"), 1.0, hidden, weight
    )
    stocks = differentiate(lambda h, w: stock(h, w, labels, reduction="sum"), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels, reduction="sum"), 1.0, hidden.double(), weight.double())
    assert_close_as_stock(got, stocks, want)
