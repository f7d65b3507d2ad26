"""Chunks of logits: they follow their budget, the result does not follow them, and nothing larger exists."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import LossSpec, Upstream, compose, loss_arithmetic, primitives
from slothplug.kernels.linear_cross_entropy import Reduction, linear_cross_entropy
from slothplug.kernels.logit_chunks import Gradients, Head, chunk_buffer, chunk_gradients, chunk_loss, chunk_rows
from tests.kernels.linear_cross_entropy_oracle import (
    EPILOGUES,
    IGNORED,
    assert_as_exact,
    differentiate,
    draw_labels,
    interpreted,
    oracle,
    stock,
)
from tests.kernels.watch import Watch

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4097])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_result_does_not_depend_on_the_chunk(
    reduction: Reduction, count: int, backend: Backend, device: torch.device
) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3803: chunk means were added up."""
    if count > 9 and interpreted(backend, device):
        pytest.skip("the chunks are cut before the backend is called, and the interpreter takes a minute for these")
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, 5).to(device), torch.randn(70, 5).to(device)
    labels = draw_labels(count, 70).to(device)
    labels[: min(4, count - 1)] = IGNORED  # one chunk of four rows has no label

    def run(rows: int) -> list[Tensor]:
        def call(h: Tensor, w: Tensor) -> Tensor:
            chunk_bytes = rows * 128 * 4
            return linear_cross_entropy(h, w, labels, reduction=reduction, chunk_bytes=chunk_bytes, backend=backend)

        return differentiate(call, 1.0, hidden, weight)

    whole = run(2 * count)
    for rows in {1, 4, count} - ({1} if count > 9 else set()):
        for mine, reference in zip(run(rows), whole, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6 * reference.abs().max().item())


def test_chunks_follow_the_budget() -> None:
    assert chunk_rows(128256, 2, 512 * 2**20) == 2048
    assert chunk_rows(151936, 2, 512 * 2**20) == 1536
    assert chunk_rows(128256, 2, 2**20) == 4
    for vocabulary, size in itertools.product((257, 65537, 151936, 262208), (2, 4)):
        rows = chunk_rows(vocabulary, size, 512 * 2**20)
        assert rows % 256 == 0 or rows < 256
        assert 0 < rows * (-(-vocabulary // 64) * 64) * size <= 512 * 2**20
        assert chunk_rows(vocabulary, size, 1) == 1


@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_in_buffers_of_the_callers(
    with_bias: bool, backend: Backend, dtype: torch.dtype, device: torch.device
) -> None:
    """Without autograd: losses and the gradients of hidden written, those of weight and bias summed over two chunks."""
    epilogue = EPILOGUES["softcap"]

    def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(seed)
        operands = [torch.randn(5, 32), torch.randn(70, 32) / 4, torch.randn(70)]
        hidden, weight, bias = (t.to(device, dtype) for t in operands)
        labels, items = draw_labels(5, 70).to(device), torch.tensor(3.0, device=device)
        composed = compose(epilogue, dtype)
        spec = LossSpec(IGNORED, 0.0, composed, composed.inner * composed.outer, None, None)
        head = Head(weight, bias if with_bias else None, None, 1.0, spec, primitives(backend))
        losses = torch.full((5,), torch.nan, device=device)
        grad_weight = torch.full_like(weight, torch.nan, dtype=loss_arithmetic(dtype))
        grad_bias = torch.full_like(bias, torch.nan, dtype=loss_arithmetic(dtype)) if with_bias else None
        gradients = Gradients(torch.full_like(hidden, torch.nan), grad_weight, grad_bias, None, None)
        buffer = chunk_buffer(head, 3)
        for start, stop in ((0, 3), (3, 5)):
            rows = hidden[start:stop]
            upstream = Upstream(None, items)
            logits = chunk_loss(rows, None, labels[start:stop], head, buffer, losses[start:stop], None, upstream)
            chunk_gradients(logits, rows, None, head, buffer, gradients.chunk(start, stop), first=start == 0)
        ours = {"loss": losses.sum() / items, "d_hidden": gradients.hidden, "d_weight": grad_weight.to(dtype)}

        def named(function: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Tensor]:
            def call(h: Tensor, w: Tensor, *b: Tensor) -> Tensor:
                options: dict[str, Any] = {"epilogue": epilogue, "reduction": "sum"}
                return function(h, w, labels, bias=b[0] if b else None, **options) / items

            names = ("loss", "d_hidden", "d_weight", "d_bias")
            return dict(zip(names, differentiate(call, 1.0, *tensors), strict=False))

        if grad_bias is not None:
            ours["d_bias"] = grad_bias.to(dtype)
        given = (hidden, weight, bias) if with_bias else (hidden, weight)
        return ours, named(stock, *given), named(oracle, *(t.double() for t in given))

    assert_as_exact(draw, dtype, f"{backend} {dtype}")


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_logits_never_exist_as_a_whole(trainable: bool, device: torch.device) -> None:
    count, vocabulary, budget = 512, 4096, 2**18
    hidden = torch.randn(count, 8, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, 8, device=device, requires_grad=trainable)
    labels = draw_labels(count, vocabulary).to(device)
    for reduction in ("mean", "none"):
        with Watch() as watch:
            linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_bytes=budget).sum().backward()
        assert watch.largest <= budget  # the expanded views of nll_loss have a storage of one element


@pytest.mark.gpu
def test_more_logits_than_int32_counts(device: torch.device) -> None:
    """One chunk of 17,000 rows of 128,256 logits: 2.2e9 elements."""
    torch.manual_seed(0)
    hidden = torch.randn(17000, 8, device=device, dtype=torch.bfloat16)
    weight = torch.randn(128256, 8, device=device, dtype=torch.bfloat16)
    labels = torch.randint(128256, (17000,), device=device)

    def run(chunk_bytes: int) -> list[Tensor]:
        return differentiate(
            lambda h, w: linear_cross_entropy(h, w, labels, chunk_bytes=chunk_bytes, backend="triton"),
            1.0,
            hidden,
            weight,
        )

    for whole, chunked in zip(run(8 * 2**30), run(512 * 2**20), strict=True):
        torch.testing.assert_close(whole, chunked, rtol=2e-2, atol=1e-5)


@pytest.mark.gpu
def test_peak_memory(device: torch.device) -> None:
    """Beyond inputs and gradients: the chunk buffer, the float32 gradient of hidden, the float32 weight gradient."""
    count, width, vocabulary, budget = 4096, 512, 50304, 64 * 2**20
    hidden = torch.randn(count, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (count,), device=device)
    for trainable in (False, True):
        weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=trainable)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=budget, backend="triton").backward()
        extra = torch.cuda.max_memory_allocated() - before
        accumulators = 4 * count * width + (6 * vocabulary * width if trainable else 0)
        assert extra <= budget + accumulators + 2 * count * width + 2**24
