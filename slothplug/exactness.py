"""The one measure of "as exact as stock": pooled errors of ours and of stock against a float64 oracle.

For each compared tensor, over draws (random inputs) of one configuration, with u the unit roundoff of the tensor's
dtype, F = u / 2 (1e-6 for float32, whose products of thousands of terms are off by several u in any order of
summation), and s the signed error sum (got - ref) ref of one draw over the pooled sum of ref^2:

(a) energy   E = sqrt(sum |got - ref|^2 / sum |ref|^2)      <= max(1.25 E_stock, F)
(b) bias     |sum of s|                                     <= stock's + F / 32 + 4 standard errors of the difference
(c) worst    max |got - ref| / (|ref| + rms of its row)     <= 2 x stock's + 4 F
(d) zeros    where ref is exactly 0: |got|                  <= stock's largest there + u^2 rms(ref)
(e) finite wherever stock is finite.

A plain "at most 1.5 times eager's error on one draw" fails pairs of equal quality and passes a scale that is off by
0.1 % or one row that is off by 2 %; pooled sums and a bias term do not. The noise of (b) is measured from how the draws
scatter: an assumed 4 u / sqrt(n) counts elements as independent, and fails stock against itself where the errors of a
row share its statistics.

In a whole model an early rounding moves every later value, and the extreme of (c) varies more: of two stock runs of a
small model that differ only in attention implementation, one was up to 3.2 times as far off as the other. There the
factor of (c) is ``MODEL_WORST_FACTOR``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

OP_DRAWS, MODEL_DRAWS = 32, 16
OP_WORST_FACTOR, MODEL_WORST_FACTOR = 2.0, 4.0

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Pool:
    """Sums over draws of one side's errors against the oracle, for one named tensor (or one kind of tensor)."""

    squared_error: float = 0.0
    squared_reference: float = 0.0
    worst: float = 0.0
    worst_at_zero: float = 0.0
    count: int = 0
    signed: dict[int, float] = field(default_factory=dict)
    """For each draw: sum (got - ref) ref."""

    def add(self, draw: int, got: torch.Tensor, ref: torch.Tensor) -> None:
        """Adds a float64 tensor of draw number ``draw``."""
        error, square = got - ref, ref.square()
        self.squared_error += error.square().sum().item()
        self.squared_reference += square.sum().item()
        self.signed[draw] = self.signed.get(draw, 0.0) + (error * ref).sum().item()
        self.count += ref.numel()
        if not ref.numel():
            return
        scale = ref.abs() + (square.mean(-1, keepdim=True).sqrt() if ref.ndim else ref.abs())
        relative = torch.where(scale > 0, error.abs() / scale.clamp_min(1e-300), 0.0)
        self.worst = max(self.worst, relative.max().item())
        zeros = ref == 0
        if zeros.any():
            self.worst_at_zero = max(self.worst_at_zero, error[zeros].abs().max().item())

    @property
    def energy(self) -> float:
        return math.sqrt(self.squared_error / self.squared_reference) if self.squared_reference else 0.0

    @property
    def biases(self) -> list[float]:
        """Each draw's share of the relative signed error."""
        return [signed / self.squared_reference if self.squared_reference else 0.0 for signed in self.signed.values()]


@dataclass
class Comparison:
    """One named tensor: ours and stock against the oracle."""

    dtype: torch.dtype
    ours: Pool = field(default_factory=Pool)
    stock: Pool = field(default_factory=Pool)
    lost: bool = False
    """Ours was not finite somewhere where stock is."""

    def add(self, draw: int, ours: torch.Tensor, stock: torch.Tensor, ref: torch.Tensor) -> None:
        ours, stock, ref = (tensor.detach().double().cpu() for tensor in (ours, stock, ref))
        if not ours.shape == stock.shape == ref.shape:
            raise AssertionError(
                f"shapes {tuple(ours.shape)} and {tuple(stock.shape)}, the oracle has {tuple(ref.shape)}"
            )
        finite = stock.isfinite() & ref.isfinite()
        self.lost |= not ours[finite].isfinite().all()
        if not self.lost:
            self.ours.add(draw, torch.where(finite, ours, 0.0), torch.where(finite, ref, 0.0))
            self.stock.add(draw, torch.where(finite, stock, 0.0), torch.where(finite, ref, 0.0))

    def why_worse(self, worst_factor: float) -> str | None:
        """Which bound ours breaks, and by how much; None where ours is as exact as stock."""
        if self.lost:
            return "not finite where stock is"
        u = torch.finfo(self.dtype).eps / 2
        floor = 1e-6 if self.dtype is torch.float32 else u / 2
        ours, stock = self.ours, self.stock
        mean_square = stock.squared_reference / max(stock.count, 1)
        bounds = {
            "(a) energy": (ours.energy, max(1.25 * stock.energy, floor)),
            "(b) bias": (abs(sum(ours.biases)), abs(sum(stock.biases)) + floor / 32 + 4 * self._noise_of_bias(u)),
            "(c) worst element": (ours.worst, worst_factor * stock.worst + 4 * floor),
            "(d) where the oracle is 0": (ours.worst_at_zero, stock.worst_at_zero + u * u * math.sqrt(mean_square)),
        }
        for name, (found, limit) in bounds.items():
            if found > limit:
                return f"{name} {found:.3e}, allowed {limit:.3e}"
        return None

    def _noise_of_bias(self, u: float) -> float:
        """Standard error of the difference of biases, from its scatter over draws; of one draw, as if independent."""
        differences = [ours - theirs for ours, theirs in zip(self.ours.biases, self.stock.biases, strict=True)]
        if len(differences) < 2:
            return max(u, self.stock.energy) / math.sqrt(max(self.stock.count, 1))
        return statistics.stdev(differences) * math.sqrt(len(differences))


@dataclass
class Exactness:
    """Pools draws of ours and stock against the oracle; ``check`` raises on the first tensor that is worse."""

    worst_factor: float = OP_WORST_FACTOR
    tensors: dict[str, Comparison] = field(default_factory=dict)
    draws: int = 0

    def add(self, ours: Tensors, stock: Tensors, oracle: Tensors) -> None:
        """Adds one draw: named outputs and gradients of each side, and their float64 values."""
        if not ours.keys() == stock.keys() == oracle.keys():
            raise AssertionError(f"compared tensors differ: {sorted(ours)}, {sorted(stock)}, {sorted(oracle)}")
        for name, ref in oracle.items():
            if ours[name].dtype != stock[name].dtype:
                raise AssertionError(f"{name}: dtype {ours[name].dtype}, stock has {stock[name].dtype}")
            comparison = self.tensors.setdefault(name, Comparison(stock[name].dtype))
            comparison.add(self.draws, ours[name], stock[name], ref)
        self.draws += 1

    def why_worse(self) -> dict[str, str]:
        """The tensors in which ours is worse than stock, each with the bound that it breaks."""
        reasons = {name: tensor.why_worse(self.worst_factor) for name, tensor in self.tensors.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def check(self, context: str = "") -> None:
        """Raises ``AssertionError`` where ours is worse than stock."""
        worse = self.why_worse()
        assert not worse, f"{context}: {worse}"


def assert_as_exact(
    draw: Callable[[int], tuple[Tensors, Tensors, Tensors]], draws: int | Iterable[int] = OP_DRAWS, context: str = ""
) -> None:
    """Calls ``draw(seed) -> (ours, stock, oracle)`` for each seed and checks the pools."""
    pool = Exactness()
    for seed in range(draws) if isinstance(draws, int) else draws:
        pool.add(*draw(seed))
    pool.check(context)
