"""What cannot be recorded runs eagerly, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slothplug.graphs.recorder import CudaRecorder
from tests.graphs.replaying import RunsAgain
from tests.graphs.steps import replays, state_of, step, train, twins, units
from tests.patching.device import DEVICE
from tests.patching.lora_models import LAYERS


class Fails(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    """A recorder on whose device nothing can be recorded."""

    def record(self, function: Callable[[], None]) -> Any:
        torch.rand(3)
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_recorded_runs_eagerly_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", Fails)
    graphed, eager, _ = twins(lora_dropout=0.3)
    train(graphed, eager, 6)
    assert replays(graphed) == 0
    reason = "cannot be recorded: RuntimeError: operation not permitted when stream is capturing"
    assert state_of(graphed).reasons[reason] == 4 * LAYERS


class FailsBackward(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    def record(self, function: Callable[[], None]) -> Any:
        if function.__name__ == "_run_backward":
            raise RuntimeError("no backward")
        return super().record(function)


class Full(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    """A recorder on a device without memory to spare."""

    def make_room(self, size: int) -> bool:
        return False


def test_nothing_is_recorded_where_the_memory_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", Full)
    graphed, eager, _ = twins()
    train(graphed, eager, 5)
    assert replays(graphed) == 0
    assert any("memory" in reason for reason in state_of(graphed).reasons)


def test_a_backward_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", FailsBackward)
    graphed, eager, report = twins()
    train(graphed, eager, 6)
    assert "its backward cannot be recorded: no backward" in str(report)


def test_a_backward_that_cannot_be_recorded_of_a_unit_that_draws_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", FailsBackward)
    graphed, eager, _ = twins(lora_dropout=0.3)
    train(graphed, eager, 2)
    with pytest.raises(RuntimeError, match=r"layers\.1, which draws .*\(no backward\).* graphs: off"):
        step(graphed)


class _Mode(torch.autograd.Function):
    """Demands that its backward is recorded where its forward was, as attention with dropout does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.recorded = _records()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        assert ctx.recorded == _records()
        return grad_output.clone()


def _records() -> bool:
    return torch.cuda.is_current_stream_capturing() if DEVICE == "cuda" else RunsAgain.records


def test_a_backward_runs_where_its_forward_did() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Mode.apply(self.norm(x))

    graphed, _ = units(Unit)
    for _ in range(5):
        graphed(torch.randn(2, 3, 16)).sum().backward()
    assert replays(graphed) == 3 * 2
    assert not [reason for reason in state_of(graphed).reasons if "recorded" in reason]
