"""The fast forward: the module's own linear layers, called in stock's order, and one kernel between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.glu import DTYPES
from slothplug.ops.glu.gated_mlp import GatedMLP, formula, gate_and_up
from slothplug.ops.glu.recompute import Reader, bind_reader, recompute_product, saves_its_input
from slothplug.patching.forward_context import facts_of
from slothplug.patching.predicates import OTHER_ARGUMENTS, plain, why_not_input
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now
from slothplug.patching.watch import UNWATCHED, Reads, Watch


class GLUFacts(NamedTuple):
    """What a call of a gated MLP may take for granted.

    Attributes:
        kernel: the kernel with its activation and layout, called with gate and up.
        reader: how the last layer saves its input; None where each call has to ask.
    """

    kernel: Callable[..., torch.Tensor]
    reader: Reader | None = None


def fast_glu(module: nn.Module, served: Served, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the MLP's forward."""
    mlp: GatedMLP = served.spec
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    facts = facts_of(served)
    if facts is None:
        facts = _why_not_mlp(module, mlp) or _facts(served)
    refusal = facts if isinstance(facts, Refusal) else why_not_now() or why_not_input(args[0], served.device_type)
    if refusal:
        return served.fall_back(module, refusal, *args)
    modules: Mapping[str, Any] = module._modules
    gate, up = gate_and_up(modules, mlp, args[0])
    last = modules[mlp.down]
    if not _fusable(gate, up, served.device_type):
        # The layers were called: calling the original forward now would run them, and their hooks, twice.
        served.calls.fallbacks["gate and up are no plain tensors of one known dtype"] += 1
        return last(formula(gate, up, mlp))
    h = served.calls.serve(facts.kernel(gate, up))
    if not saves_its_input(last, facts.reader):
        return last(h)
    with recompute_product(h, gate, up, facts.kernel):
        return last(h)


def bind(module: nn.Module, served: Served, watch: Watch) -> GLUFacts | Refusal:
    """The facts for as long as the MLP, its bypassed children and its last layer stay what they are."""
    mlp: GatedMLP = served.spec
    refusal = _why_not_mlp(module, mlp, watch)
    return refusal or _facts(served, bind_reader(watch.item(module._modules, mlp.down), watch))


def _facts(served: Served, reader: Reader | None = None) -> GLUFacts:
    return GLUFacts(partial(served.kernel, **served.spec.arguments()), reader)


def _why_not_mlp(module: nn.Module, mlp: GatedMLP, reads: Reads = UNWATCHED) -> Refusal | None:
    """Why the MLP does not compute what it computed when it was recognised."""
    modules: Mapping[str, Any] = module._modules
    for name, settled in mlp.settled.items():
        part = reads.get(modules, name) if name else module
        if part is not None and name and not reads.unhooked(part):
            return Refusal(f"hooks on {name}")
        if part is None or not settled.fits(part, reads):
            dropout = part is not None and part.__dict__.get("p")
            return Refusal(f"dropout in {name}" if dropout else f"{name or 'the MLP'} was changed after the patch")
    return None


def _fusable(gate: object, up: object, device_type: str) -> bool:
    if not plain(gate) or gate.dtype not in DTYPES or gate.device.type != device_type:
        return False
    return up is None or (plain(up) and up.dtype == gate.dtype and up.shape == gate.shape)
