"""Models with graphs and their eager twins, and steps of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn

import slothplug
from slothplug.graphs.state import GraphState
from slothplug.patching.report import Report
from slothplug.patching.served import STATE, Served
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, layer, model

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]


OTHER = IDS[:, :7].contiguous()


# The checkpointing function as it is given: what is taken over is the business of tests/checkpointing.
ON = {"graphs": "auto", "graph_padding": False, "checkpointing": "off"}


OFF = {"graphs": "off", "checkpointing": "off"}


def twins(**config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """Two equal patched models, the first with graphs, and the first one's report."""
    graphed = model(**config).to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    return graphed, eager, slothplug.patch(graphed, ON)


def state_of(one: nn.Module) -> GraphState:
    states = (part.__dict__.get(STATE) for part in one.modules())
    return next(s.shared for s in states if isinstance(s, Served) and s.op == "graphs")


def replays(one: nn.Module) -> int:
    return state_of(one).replays


def generator() -> torch.Tensor:
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


def step(one: nn.Module, ids: torch.Tensor = IDS, zero: bool = True, **options: Any) -> Outcome:
    if zero:
        one.zero_grad()
    torch.manual_seed(3)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=options.pop("autocast", False)):
        loss = one(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}, generator()


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert [name for name in theirs[1] if not torch.equal(ours[1][name], theirs[1][name])] == []
    assert torch.equal(ours[2], theirs[2])


def move(one: nn.Module) -> None:
    """An optimizer's step."""
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def train(graphed: nn.Module, eager: nn.Module, steps: int, **options: Any) -> None:
    for _ in range(steps):
        assert_same(step(graphed, **options), step(eager, **options))
        move(graphed)
        move(eager)


def q(one: nn.Module) -> Any:
    return layer(one, "layers.1.self_attn.q_proj")


PADDED = {"graphs": "auto", "checkpointing": "off"}


def gradients(one: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


def units(unit: type[nn.Module], *arguments: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, nn.Module]:
    """A patched model of two units with graphs, and its equal without; ``arguments`` make one more for each unit."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([unit(), unit()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more = [(make(x),) for make in arguments] or [(), ()]
            for each, argument in zip(self.layers, more, strict=True):
                x = each(x, *argument)
            return x

    for kind in (unit, Model):
        kind.forward.__module__ = "transformers.models.unit"  # a framework's code changes no model inside a call
    eager = Model()
    graphed = copy.deepcopy(eager)
    slothplug.patch(eager, {**OFF, "ops": ["rms_norm"]})
    slothplug.patch(graphed, {**PADDED, "ops": ["rms_norm"]})
    return graphed, eager
