"""One call of an output head, stock and with its logits put off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.ops.head.head_call import HeadCall
from slothplug.ops.head.lazy_logits import LazyLogits, put_off
from slothplug.ops.head.statistics_policy import StatisticsPolicy
from slothplug.patching.served import Calls
from tests.patching.device import DEVICE, cpu_only

B, T, H, V = 2, 5, 8, 11
LABELS = torch.tensor([3, 0, -100, 10, 5, 1, -100, 2, 9, 4], device=DEVICE)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * max(1.0, expected.abs().max().item()))


class Head:
    """Operands of one head call; ``stock()`` and ``lazy()`` are its two outputs."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = True, chunk_bytes: int = 2**20) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(B, T, H, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
        self.calls, self.chunk_bytes = Calls(), chunk_bytes

    @property
    def operands(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def stock(self) -> torch.Tensor:
        return F.linear(self.hidden * 1, self.weight, self.bias)

    def lazy(self, dtype: torch.dtype | None = None) -> LazyLogits:
        self.call = HeadCall(
            self.hidden * 1, self.weight, self.bias, dtype or self.hidden.dtype,
            partial(linear_cross_entropy, backend="torch"), self.chunk_bytes, self.calls, StatisticsPolicy(),
        )  # fmt: skip
        return put_off(self.call)

    def check(self, use: Callable[[torch.Tensor], torch.Tensor], fused: bool) -> None:
        """``use`` gives stock's values and gradients on lazy logits, and is fused or not."""
        stock = use(self.stock())
        expected = torch.autograd.grad(stock.sum() if stock.ndim else stock, self.operands)
        lazy = use(self.lazy())
        assert_close(lazy.detach() + 0, stock.detach())
        got = torch.autograd.grad(lazy.sum() if lazy.ndim else lazy, self.operands)
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)
        assert self.calls.served == (1 if fused else 0), self.calls
        assert not self.calls.fallbacks if fused else self.calls.fallbacks.total() == 1, self.calls


def on_this_device(cases: dict[str, Callable[..., Any]]) -> list[Any]:
    """NumPy shares memory with tensors on a CPU only."""
    of_a_cpu = {"numpy", "asarray", "through numpy"}
    return [pytest.param(case, id=name, marks=[cpu_only] if name in of_a_cpu else []) for name, case in cases.items()]
