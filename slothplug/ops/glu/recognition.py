"""Which gated MLP a module is, found by calls of a twin of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from slothplug.kernels.glu import FORMULAS, LAYOUTS
from slothplug.ops.glu.gated_mlp import GatedMLP, formula
from slothplug.ops.glu.structure import Shape, children_of, recording_twin
from slothplug.patching.precision import preserved_rng
from slothplug.patching.predicates import device_of
from slothplug.patching.proof import probe_rows
from slothplug.patching.settled import Settled
from slothplug.patching.sites import Refusal

# A forward that reads widths from its configuration needs a twin of its real size: up to 256 MB of float32.
LARGEST_TWIN = 64_000_000


@dataclass(frozen=True)
class Identified:
    """A gated MLP, and the shape of the twin on which it was recognised."""

    mlp: GatedMLP
    shape: Shape


def identify(module: nn.Module, shapes: list[Shape]) -> Identified | Refusal:
    """Finds roles, activation and layout with which the formula reproduces a twin of the module in float32.

    The twin has recording linear layers, small ones unless its forward insists on the real widths.
    """
    device = device_of(module)
    outcomes = []
    with preserved_rng(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for shape in shapes:
            outcome = _identify(module, shape)
            if isinstance(outcome, Identified):
                return outcome
            outcomes.append(outcome)
    return next((unknown for unknown in outcomes if unknown.reason), Refusal())


def _identify(module: nn.Module, real: Shape) -> Identified | Refusal:
    for shape in (real.shrunk(), real):
        if shape.elements() > LARGEST_TWIN:
            break
        try:
            return _recognise(module, shape)
        except Exception:  # the twin's forward does not run on these widths, or on one tensor
            continue
    # Three equal square layers are more often an attention than an MLP, and nothing to report.
    return Refusal("its forward does not run on hidden states alone") if real.intermediate != real.hidden else Refusal()


def _recognise(module: nn.Module, shape: Shape) -> Identified | Refusal:
    candidates: list[GatedMLP] | None = None
    for training in (True, False):
        double, calls = recording_twin(module, shape, training)
        x = probe_rows(shape.hidden, torch.float32, device_of(module)).detach()
        expected = double(x)
        order = [call.name for call in calls]
        called = {call.name: call for call in calls}
        if sorted(order) != sorted((*shape.inner, shape.down)) or order[-1] != shape.down:
            return Refusal()
        if not all(called[name].input.equal(x) for name in shape.inner) or called[shape.down].input.equal(x):
            return Refusal()
        if not isinstance(expected, torch.Tensor) or not torch.equal(expected, called[shape.down].output):
            return _refusal_of(module, "its forward returns something else than what its last layer returns")
        if candidates is None:
            candidates = list(_candidates(module, shape, order))
        h = called[shape.down].input
        candidates = [
            mlp
            for mlp in candidates
            if _same(formula(called[mlp.gate].output, called[mlp.up].output if mlp.up else None, mlp), h)
        ]
        if not candidates:
            return _refusal_of(module, "computes something else than act(gate) * up between its linear layers")
    assert candidates
    parts = {"": module, **{name: module.get_submodule(name) for name in candidates[0].bypassed}}
    settled: dict[str, Settled] = {}
    for name, part in parts.items():
        found = Settled.of(part)
        if isinstance(found, Refusal):
            return found.within(name) if name else found
        settled[name] = found
    return Identified(replace(candidates[0], settled=settled), shape)


def _refusal_of(module: nn.Module, otherwise: str) -> Refusal:
    dropouts = [name for name, child in children_of(module) if isinstance(child, nn.Dropout) and child.p > 0]
    if dropouts:
        return Refusal(f"dropout between its layers ({', '.join(dropouts)})")
    return Refusal(otherwise)


def _candidates(module: nn.Module, shape: Shape, order: list[str]) -> Iterator[GatedMLP]:
    bypassed = tuple(name for name in module._modules if name not in (*shape.inner, shape.down))
    for activation in FORMULAS:
        if len(shape.inner) == 1:
            for layout in LAYOUTS:
                yield GatedMLP(shape.inner[0], None, shape.down, activation, layout, bypassed=bypassed)  # type: ignore[arg-type]
        else:
            for gate, up in itertools.permutations(shape.inner):
                yield GatedMLP(gate, up, shape.down, activation, up_first=order[0] == up, bypassed=bypassed)


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to a few float32 roundings of each row's largest value."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return bool(((got - expected).abs() <= 2e-6 * scale).all())
