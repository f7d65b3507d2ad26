"""Linear + cross-entropy is as exact as the unfused loss, on both backends: every dtype, epilogue and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slothplug.kernels.backend import Backend
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import (
    EPILOGUES,
    HOW,
    assert_as_exact,
    compute_in_forward,
    differentiate,
    exactness_draw,
    interpreted,
    oracle,
    skip_if_not_rounded,
)

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("mixed", [False, True], ids=["one_rms", "mixed_rms"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_stock(dtype: torch.dtype, how: str, mixed: bool, backend: Backend, device: torch.device) -> None:
    skip_if_not_rounded(backend, dtype, device)
    if interpreted(backend, device) and (how.startswith("mean") or mixed):
        pytest.skip("interpreted, each of these takes many seconds; the others run the same kernel code")
    draw = exactness_draw(dtype, device, how, mixed, backend, (8, 32, 257), epilogue=EPILOGUES["cast"])
    assert_as_exact(draw, dtype, f"{backend} {dtype} {how}")


@pytest.mark.parametrize("epilogue", ["none", "softcap", "scale", "divide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_epilogues_as_exact_as_stock(dtype: torch.dtype, epilogue: str, backend: Backend, device: torch.device) -> None:
    skip_if_not_rounded(backend, dtype, device)
    if interpreted(backend, device) and (dtype is torch.float16 or epilogue == "none"):
        pytest.skip("interpreted, each of these takes many seconds; the others run the same kernel code")
    draw = exactness_draw(dtype, device, "sum_over_items", False, backend, (6, 32, 257), epilogue=EPILOGUES[epilogue])
    assert_as_exact(draw, dtype, f"{backend} {dtype} {epilogue}")


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_options_as_exact_as_stock(
    label_smoothing: float, weighted: bool, backend: Backend, device: torch.device
) -> None:
    class_weight = torch.rand(257, generator=torch.Generator().manual_seed(1)).to(device) if weighted else None
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "class_weight": class_weight}
    if interpreted(backend, device) and not (label_smoothing and weighted):
        pytest.skip("interpreted, each of these takes many seconds; both options together run the same kernel code")
    draw = exactness_draw(torch.float32, device, "mean", False, backend, (6, 32, 257), **options)
    assert_as_exact(draw, torch.float32, backend)


@pytest.mark.parametrize("epilogue", ["cast", "softcap", "divide"])
@pytest.mark.parametrize("how", ["mean", "mean_scaled", "sum_over_items"])
def test_gradients_in_the_forward_as_exact_as_stock(how: str, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_forward(monkeypatch)
    draw = exactness_draw(
        torch.bfloat16, torch.device("cpu"), how, False, "torch", (6, 32, 257), epilogue=EPILOGUES[epilogue]
    )
    assert_as_exact(draw, torch.bfloat16, f"{how} {epilogue}")


def test_weight_gradient_is_accumulated_in_float32(backend: Backend, device: torch.device) -> None:
    """https://github.com/apple/ml-cross-entropy/issues/14: many chunks, a small vocabulary, low precision."""
    if interpreted(backend, device):
        pytest.skip("the products are the same on both backends, and the interpreter takes a minute for so many rows")
    count = 1024
    draw = exactness_draw(
        torch.bfloat16,
        device,
        "sum_over_items",
        False,
        backend,
        (count, 16, 32),
        ours_only={"chunk_bytes": count // 16 * 64 * 2},
        epilogue=EPILOGUES["cast"],
    )
    assert_as_exact(draw, torch.bfloat16, backend)


def test_gradient_of_a_loss_scale_does_not_underflow(backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/968: gradients made in the forward do not know the loss scale.

    The 8191 small probabilities of a row, over 16 rows, are below float16's smallest number; times 65536 they are not.
    """
    rows, vocabulary, scale = 16, 8192, 65536.0
    rows = 4 if interpreted(backend, device) else rows
    hidden = torch.zeros(rows, 2, dtype=torch.float16, device=device)
    hidden[:, 0] = 1.0
    weight = torch.zeros(vocabulary, 2, dtype=torch.float16, device=device)
    weight[:, 0], weight[0, 0] = -9.0, 6.0
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    options: dict[str, Any] = {"epilogue": EPILOGUES["cast"]}
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, backend=backend, **options), scale, hidden, weight
    )
    want = differentiate(lambda h, w: oracle(h, w, labels, **options), scale, hidden.double(), weight.double())
    assert (got[2][:, 0] != 0).all()
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=2e-3, atol=1e-5)
