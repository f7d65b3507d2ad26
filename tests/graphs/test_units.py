"""What a unit may do inside, and what keeps it from being recorded."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import slothplug
from tests.graphs.steps import ON, replays, state_of, train, twins, units


def test_units_with_other_arguments_of_the_same_shape() -> None:
    """As layers of local and of global attention get other rotary tables."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * scale

    graphed, eager = units(Unit, torch.ones_like, lambda x: torch.full_like(x, 3.0))
    for _ in range(5):
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            x = torch.linspace(-1, 2, 96).view(2, 3, 16).requires_grad_()
            (one(x) ** 3).sum().backward()
            grads.append([x.grad, *(p.grad.clone() for p in one.parameters() if p.grad is not None)])
        assert all(map(torch.equal, *grads))
    assert replays(graphed) == 3 * 2


def test_arguments_that_are_expanded_or_lie_in_a_dictionary() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.norm(x) * scales["one"] + scales["other"]

    def scales(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": torch.arange(3.0)[:, None].expand(x.shape), "other": torch.ones(16).expand(x.shape)}

    graphed, eager = units(Unit, scales, scales)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert replays(graphed) == 3 * 2


def test_a_unit_that_writes_into_its_buffers_runs_eagerly() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.mean(dim=(0, 1))
            return self.norm(x) + self.seen

    graphed, eager = units(Unit)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert state_of(graphed).reasons["cannot be recorded: RuntimeError: it writes into its buffers"] == 3 * 2


def test_a_unit_that_keeps_what_it_computed_runs_eagerly() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.before: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.before = self.before, self.norm(x)
            return self.before if before is None else self.before - before

    graphed, eager = units(Unit)
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert replays(graphed) == 0
    assert any("sets attributes" in reason for reason in state_of(graphed).reasons)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_unit_that_draws_random_numbers_on_the_host_runs_eagerly(draw: Callable[[], float]) -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * draw()

    graphed, eager = units(Unit)
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(2, 3, 16)
            outputs = []
            for one in (graphed, eager):
                random.seed(seed)
                np.random.seed(seed)
                outputs.append(one(x))
            assert torch.equal(*outputs)
    assert any("random numbers from Python or NumPy" in reason for reason in state_of(graphed).reasons)


def test_a_unit_that_returns_something_else_than_tensors_runs_eagerly() -> None:
    class Output(dict):  # type: ignore[type-arg]
        pass

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> Output:
            return Output(x=self.norm(x))

    Unit.forward.__module__ = "transformers.models.unit"  # a framework's code, which changes no model inside a call

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Unit(), Unit()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for unit in self.layers:
                x = unit(x)["x"]
            return x

    Model.forward.__module__ = Unit.forward.__module__
    one = Model()
    slothplug.patch(one, {**ON, "ops": ["rms_norm"]})
    x = torch.randn(2, 3, 16)
    first = one(x)
    for _ in range(4):
        assert torch.equal(one(x), first)
    assert state_of(one).reasons["cannot be recorded: TypeError: its forward returns a Output"] == 3 * 2


@pytest.mark.gpu
def test_a_unit_that_waits_for_the_device_runs_eagerly_and_spoils_nothing() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(self.norm(x), 0.5) * (1.0 if x.sum().item() else 2.0)

    graphed, eager = units(Unit)
    x = torch.randn(2, 3, 16)
    for _ in range(5):
        outputs = []
        for one in (graphed, eager):
            torch.manual_seed(1)
            outputs.append(one(x))
        assert torch.equal(*outputs)
    assert replays(graphed) == 0
    assert any(reason.startswith("cannot be recorded") for reason in state_of(graphed).reasons)
    train(*twins(lora_dropout=0.2)[:2], 4)
