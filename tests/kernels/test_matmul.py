"""Sums of products that are kept in float32."""

from __future__ import annotations

import pytest
import torch

from slothplug.kernels import matmul


def test_accumulation_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_ROWS", 7)
    a, b = torch.randn(2, 5, 20, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    total = torch.full((20, 3), torch.nan)
    for index in range(2):
        matmul.accumulate(total, a[index].t(), b[index], first=index == 0)
    torch.testing.assert_close(total, sum(x.float().t() @ y.float() for x, y in zip(a, b, strict=True)))
