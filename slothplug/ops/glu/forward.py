"""The fast forward: the module's own linear layers, called in stock's order, and one kernel between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.kernels.glu import DTYPES
from slothplug.ops.glu.gated_mlp import GatedMLP, formula, gate_and_up
from slothplug.ops.glu.recompute import not_kept
from slothplug.patching.predicates import OTHER_ARGUMENTS, hooked, plain, why_not_input
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now


def fast_glu(module: nn.Module, served: Served, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the MLP's forward."""
    mlp: GatedMLP = served.spec
    modules: Mapping[str, Any] = module._modules
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    if reason := _why_not(module, mlp, args[0], served.device_type):
        return served.fall_back(module, reason, *args)
    gate, up = gate_and_up(modules, mlp, args[0])
    if not _fusable(gate, up, served.device_type):
        # The layers were called: calling the original forward now would run them, and their hooks, twice.
        served.calls.fallbacks["gate and up are no plain tensors of one known dtype"] += 1
        return modules[mlp.down](formula(gate, up, mlp))
    kernel = partial(served.kernel, **mlp.arguments())
    h = served.calls.serve(kernel(gate, up))
    last = modules[mlp.down]
    with not_kept(h, gate, up, kernel, last):
        return last(h)


def _why_not(module: nn.Module, mlp: GatedMLP, x: torch.Tensor, device_type: str) -> Refusal | None:
    if reason := why_not_now() or why_not_input(x, device_type):
        return reason
    modules: Mapping[str, Any] = module._modules
    for name in mlp.bypassed:
        child = modules[name]
        if hooked(child):
            return Refusal(f"hooks on {name}")
        if child.training and getattr(child, "p", 0):
            return Refusal(f"dropout in {name}")
    for name, settled in mlp.settled.items():
        part = modules[name] if name else module
        if part is None or not settled.fits(part):
            return Refusal(f"{name or 'the MLP'} was changed after the patch")
    return None


def _fusable(gate: object, up: object, device_type: str) -> bool:
    if not plain(gate) or gate.dtype not in DTYPES or gate.device.type != device_type:
        return False
    return up is None or (plain(up) and up.dtype == gate.dtype and up.shape == gate.shape)
