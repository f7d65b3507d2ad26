"""Products of 16-bit operands whose results, or sums of results, are float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slothplug.kernels import matmul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(20, 33, generator=generator), torch.randn(33, 5, generator=generator)
    return left.to(device, dtype), right.to(device, dtype)


@pytest.mark.parametrize("scaling", [1.0, -0.3])
@pytest.mark.parametrize("result", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_in_the_dtype_that_is_asked_for(
    dtype: torch.dtype, result: torch.dtype | None, scaling: float, device: torch.device
) -> None:
    left, right = operands(dtype, device)
    got = matmul.matmul(left, right, result, scaling)
    assert got.dtype is (result or dtype)
    exact = scaling * (left.double() @ right.double())
    widened = got.dtype is torch.float32 and (dtype is torch.float32 or matmul.can_widen(device.type, dtype))
    unit = torch.finfo(torch.float32 if widened else dtype).eps
    assert ((got.double() - exact).abs() <= unit * (exact.abs() + 33)).all()


def test_autocast_changes_no_product(device: torch.device) -> None:
    left, right = operands(torch.float32, device)
    expected = matmul.matmul(left, right, scaling=0.5), torch.zeros(20, 5, device=device)
    matmul.accumulate(expected[1], left, right, first=True)
    with torch.autocast(device.type, torch.bfloat16):
        got = matmul.matmul(left, right, scaling=0.5), torch.zeros(20, 5, device=device)
        matmul.accumulate(got[1], left, right, first=True)
    assert all(map(torch.equal, got, expected))


def test_accumulation_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_ROWS", 7)
    left, right = torch.randn(2, 5, 20, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    total = torch.full((20, 3), torch.nan)
    for index in range(2):
        matmul.accumulate(total, left[index].t(), right[index], first=index == 0)
    torch.testing.assert_close(total, sum(x.float().t() @ y.float() for x, y in zip(left, right, strict=True)))


def test_memory_that_runs_out_says_nothing_about_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is kept for the life of the process."""

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    matmul.can_widen.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            matmul.can_widen("cpu")
    assert matmul.can_widen("cpu") is False
