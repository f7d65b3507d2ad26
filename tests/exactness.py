"""The project's one measure of "as exact as stock": pooled errors of ours and of stock against a float64 oracle.

For each compared tensor, over K draws of one configuration, with u the unit roundoff of the tensor's dtype:

(a) energy   E = sqrt(sum |got - ref|^2 / sum |ref|^2)          <= max(1.25 E_stock, u / 2; 1e-6 where float32)
(b) bias     |sum (got - ref) ref| / sum ref^2                  <= stock's + u / 64 + 4 u / sqrt(n)
(c) worst    max |got - ref| / (|ref| + rms of its row)         <= 2 x stock's + 2 u
(d) zeros    where ref is exactly 0: |got| <= stock's largest there + u^2 rms(ref)
(e) finite wherever stock is finite.

A plain "at most 1.5 times eager's error on one draw" fails pairs of equal quality and passes a scale that is off by
0.1 % or one row that is off by 2 %; pooled sums and a bias term do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OP_DRAWS, MODEL_DRAWS = 32, 16

Tensors = Mapping[str, torch.Tensor]


@dataclass
class _Pool:
    """Sums over draws of one candidate (ours or stock) against the oracle, for one named tensor."""

    squared_error: float = 0.0
    signed_error: float = 0.0
    squared_reference: float = 0.0
    worst: float = 0.0
    worst_at_zero: float = 0.0
    finite: bool = True
    count: int = 0

    def add(self, got: torch.Tensor, ref: torch.Tensor) -> None:
        got, ref = got.detach().double().cpu(), ref.detach().double().cpu()
        if got.shape != ref.shape:
            raise AssertionError(f"shape {tuple(got.shape)} where the oracle has {tuple(ref.shape)}")
        self.finite &= bool(got.isfinite().all())
        if not self.finite or ref.numel() == 0:
            return
        error = got - ref
        self.squared_error += error.square().sum().item()
        self.signed_error += (error * ref).sum().item()
        self.squared_reference += ref.square().sum().item()
        row_rms = ref.square().mean(-1, keepdim=True).sqrt() if ref.ndim else ref.abs()
        scale = ref.abs() + row_rms
        self.worst = max(self.worst, torch.where(scale > 0, error.abs() / scale.clamp_min(1e-300), 0.0).max().item())
        zeros = ref == 0
        if zeros.any():
            self.worst_at_zero = max(self.worst_at_zero, error[zeros].abs().max().item())
        self.count += ref.numel()

    @property
    def energy(self) -> float:
        return math.sqrt(self.squared_error / self.squared_reference) if self.squared_reference else 0.0

    @property
    def bias(self) -> float:
        return abs(self.signed_error) / self.squared_reference if self.squared_reference else 0.0


@dataclass
class Exactness:
    """Pools draws of ``ours`` and ``stock`` against ``oracle``; ``check`` raises on the first tensor that is worse."""

    ours: dict[str, _Pool] = field(default_factory=dict)
    stock: dict[str, _Pool] = field(default_factory=dict)
    dtype: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, ours: Tensors, stock: Tensors, oracle: Tensors) -> None:
        """Adds one draw: named outputs and gradients of each candidate, and their float64 values."""
        if not ours.keys() == stock.keys() == oracle.keys():
            raise AssertionError(f"compared tensors differ: {sorted(ours)}, {sorted(stock)}, {sorted(oracle)}")
        for name, ref in oracle.items():
            if ours[name].dtype != stock[name].dtype:
                raise AssertionError(f"{name}: dtype {ours[name].dtype}, stock has {stock[name].dtype}")
            self.dtype[name] = stock[name].dtype
            self.ours.setdefault(name, _Pool()).add(ours[name], ref)
            self.stock.setdefault(name, _Pool()).add(stock[name], ref)

    def check(self, context: str = "") -> None:
        for name, stock in self.stock.items():
            _compare(f"{context} {name}".strip(), self.ours[name], stock, self.dtype[name])


def _compare(name: str, ours: _Pool, stock: _Pool, dtype: torch.dtype) -> None:
    if not stock.finite:
        return  # nothing can be asked where stock itself overflows
    assert ours.finite, f"{name}: not finite where stock is"
    if not stock.count:
        return
    u = UNIT_ROUNDOFF[dtype]
    floor = 1e-6 if dtype is torch.float32 else u / 2
    limit = max(1.25 * stock.energy, floor)
    assert ours.energy <= limit, f"{name}: (a) energy {ours.energy:.3e} > {limit:.3e} (stock {stock.energy:.3e})"
    limit = stock.bias + u / 64 + 4 * u / math.sqrt(stock.count)
    assert ours.bias <= limit, f"{name}: (b) bias {ours.bias:.3e} > {limit:.3e} (stock {stock.bias:.3e})"
    limit = 2 * stock.worst + 2 * u
    assert ours.worst <= limit, f"{name}: (c) worst element {ours.worst:.3e} > {limit:.3e} (stock {stock.worst:.3e})"
    limit = stock.worst_at_zero + u * u * math.sqrt(stock.squared_reference / stock.count)
    assert ours.worst_at_zero <= limit, f"{name}: (d) {ours.worst_at_zero:.3e} > {limit:.3e} where the oracle is 0"


def assert_as_exact(draw: Callable[[int], tuple[Tensors, Tensors, Tensors]], draws: int | Iterable[int] = OP_DRAWS, context: str = "") -> None:
    """Calls ``draw(seed) -> (ours, stock, oracle)`` for each seed and checks the pools."""
    pool = Exactness()
    for seed in range(draws) if isinstance(draws, int) else draws:
        pool.add(*draw(seed))
    pool.check(context)
