"""What a gated MLP computes, as learnt from a module, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slothplug.kernels.glu import FORMULAS, Activation, Layout, split_packed
from slothplug.patching.settled import Settled


@dataclass(frozen=True)
class GatedMLP:
    """What one gated MLP computes. Roles are names of children; ``up`` is None where ``gate`` holds both."""

    gate: str
    up: str | None
    down: str
    activation: Activation
    layout: Layout | None = None
    up_first: bool = False
    """Stock calls ``up`` before ``gate``: the order in which dropout inside adapters draws."""
    bypassed: tuple[str, ...] = ()
    """Children that stock calls and the fast forward does not: activation, Identity, Dropout with p = 0."""
    settled: Mapping[str, Settled] = field(default_factory=dict, compare=False)
    """The attributes that they, and the MLP itself under the name of "", had when this was learnt."""

    def arguments(self) -> dict[str, str]:
        """Keyword arguments of the kernel."""
        if self.layout is None:
            return {"activation": self.activation}
        return {"activation": self.activation, "layout": self.layout}


def formula(gate: torch.Tensor, up: torch.Tensor | None, mlp: GatedMLP) -> torch.Tensor:
    """The product in plain PyTorch, with the roundings of the stock modules."""
    if up is None:
        gate, up = split_packed(gate, mlp.layout or "gate_up")
    return FORMULAS[mlp.activation](gate) * up


def gate_and_up(modules: Mapping[str, Any], mlp: GatedMLP, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls the inner layers in stock's order."""
    if mlp.up is None:
        return modules[mlp.gate](x), None
    if mlp.up_first:
        up = modules[mlp.up](x)
        return modules[mlp.gate](x), up
    return modules[mlp.gate](x), modules[mlp.up](x)
