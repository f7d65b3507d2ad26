"""The padding between the rows of a matrix affects no result: NaN is planted there.

oneDNN's AMX product of bfloat16 and float16 reads beyond each row of its left operand and multiplies those elements by
0. ``PaddingReader`` computes such products on every CPU. On every device it fills new memory with NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import slothplug
from slothplug.kernels.backend import Backend, why_not_triton
from slothplug.kernels.cross_entropy import Epilogue, LossSpec, RowStatistics, Upstream, primitives
from slothplug.kernels.linear_cross_entropy import LowRank, linear_cross_entropy
from slothplug.kernels.matmul import matmul
from tests.kernels.linear_cross_entropy_oracle import IGNORED, differentiate
from tests.patching.architectures import step, tiny
from tests.patching.device import DEVICE

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


class PaddingReader(TorchDispatchMode):
    """New memory is NaN; on a CPU a product adds 0 times the padding after each row of its left operand."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("empty", "empty_strided", "empty_like", "new_empty") and out.is_floating_point():
            out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0).fill_(math.nan)
        if name in ("mm", "addmm", "mm_", "addmm_") and out.device.type == "cpu":
            left = args[0] if name.startswith("mm") else args[1]
            padding = padding_of(left)
            if padding is not None:
                out[:-1] += (0 * padding.sum(1, keepdim=True)).to(out.dtype)
        return out


def padding_of(matrix: Tensor) -> Tensor | None:
    """[rows - 1, gap]: the elements between the rows of ``matrix``; None where rows follow one another."""
    rows, columns = matrix.shape
    pitch, step = matrix.stride()
    if step != 1 or pitch <= columns or rows < 2:
        return None
    return matrix.as_strided((rows - 1, pitch - columns), (pitch, 1), matrix.storage_offset() + columns)


def in_nan(x: Tensor, gap: int) -> Tensor:
    """``x`` [rows, columns] as a view whose rows have ``gap`` elements of NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), math.nan, dtype=x.dtype, device=x.device)
    return wide[:, : x.shape[1]].copy_(x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("term", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_depends_on_padding(
    dtype: torch.dtype, term: torch.dtype | None, reduction: Any, backend: Backend, device: torch.device
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 5).to(device, dtype), torch.randn(70, 5).to(device, dtype)
    labels = torch.arange(20, device=device).masked_fill(torch.arange(20, device=device) % 3 == 0, IGNORED)
    low = [] if term is None else [torch.randn(20, 3).to(device, term), torch.randn(70, 3).to(device, term)]

    def call(h: Tensor, w: Tensor, *low: Tensor) -> Tensor:
        low_rank = LowRank(in_nan(low[0], 3), low[1], 0.5) if low else None
        return linear_cross_entropy(
            in_nan(h, 5), w, labels, low_rank=low_rank, reduction=reduction, chunk_bytes=8 * 128 * 4, backend=backend
        )

    expected = differentiate(call, 1.0, hidden, weight, *low)
    with PaddingReader():
        got = differentiate(call, 1.0, hidden, weight, *low)
    for mine, reference in zip(got, expected, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_column_view_is_a_left_operand(dtype: torch.dtype, device: torch.device) -> None:
    left, right = torch.randn(20, 33).to(device, dtype), torch.randn(33, 5).to(device, dtype)
    with PaddingReader():
        got = matmul(in_nan(left, 3), right)
    torch.testing.assert_close(got, left @ right)


@pytest.mark.parametrize("top", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("with_statistics", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 70, 600])
def test_losses_neither_depend_on_padding_nor_write_to_it(
    vocabulary: int, with_statistics: bool, top: float, backend: Backend, device: torch.device
) -> None:
    """The padding of the logits holds zeros, which the products read: no d logits may be written to it."""
    pitch = (vocabulary + 64) // 64 * 64
    labels = torch.tensor([1, IGNORED, 4, 0], device=device)
    spec = LossSpec(IGNORED, 0.1, Epilogue(1.0, False, 1.0, torch.float32), 1.0, None, None)
    values = torch.randn(4, vocabulary, device=device) + top

    def run(padding: float) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.full((4, pitch), padding, device=device)
        logits[:, :vocabulary] = values
        losses = torch.empty(4, device=device)
        statistics = RowStatistics.empty(4, device) if with_statistics else None
        primitives(backend).cross_entropy_rows(
            logits[:, :vocabulary], labels, losses, spec, Upstream(None, None), statistics
        )
        return losses, logits[:, :vocabulary], logits[:, vocabulary:]

    losses, gradients, padding = run(0.0)
    assert (padding == 0).all()
    assert gradients.isfinite().all()
    for mine, reference in zip(run(math.nan), (losses, gradients), strict=False):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_in_bfloat16_has_finite_gradients(backend: Backend) -> None:
    """A vocabulary of 257 leaves 63 elements between the rows of logits; every gradient of the model was NaN."""
    if backend == "triton" and (reason := why_not_triton(torch.device(DEVICE))):
        pytest.skip(reason)
    model = tiny("llama", num_hidden_layers=1, vocab_size=257).to(DEVICE, torch.bfloat16)
    report = slothplug.patch(model, {"backend": backend, "ops": ["head"], "verify": False})
    with PaddingReader():
        found = step(model)
    assert report.fused[0].calls.served
    assert found.gradients
    assert not [name for name, gradient in found.gradients.items() if not gradient.isfinite().all()]
