"""CUDA graphs: the repeated layers of a patched model are recorded, forward and backward, and replayed.

With short sequences a step's time is Python's, not the device's. A layer whose shapes recur is recorded as it is
patched, so its numbers are those of the eager patched step to the bit.

    find the units (units)  ->  a unit's call (forward): key from its arguments (signature)  ->  session of the model's
    call (state)  ->  recordings of the unit (captured) through the device's recorder (recorder) and boxes (mailbox)
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.graphs import checkpointed
from slothplug.graphs import state as graph_state
from slothplug.graphs.facts import bind
from slothplug.graphs.forward import fast_unit
from slothplug.graphs.recorder import CudaRecorder
from slothplug.graphs.units import find_units
from slothplug.hookspecs import hookimpl
from slothplug.patching.model_context import ModelContext
from slothplug.patching.predicates import device_of
from slothplug.patching.private_class import is_patched, stock_class, take, with_forward
from slothplug.patching.report import Report
from slothplug.patching.served import STATE, Calls, Served

NAME = "graphs"

_MEMBERS = ((checkpointed.NAME, checkpointed.CheckpointingFunction()),)


@hookimpl
def slothplug_after_patch(model: nn.Module, report: Report) -> None:
    if report.settings.graphs == "off":
        return
    units = list(find_units(model))
    if not units:
        return
    devices = {device_of(unit) for _, unit in units}
    if graph_state.make_recorder is CudaRecorder and {device.type for device in devices} != {"cuda"}:
        report.notes.append(f"graphs: none, the model is on {', '.join(sorted(map(str, devices)))}")
        return
    context = next(s.context for part in units[0][1].modules() if isinstance(s := part.__dict__.get(STATE), Served))
    state = context.shared(graph_state.GraphState)
    state.settings = report.settings
    state.takes_use_cache = "use_cache" in inspect.signature(stock_class(model).forward).parameters
    for name, unit in units:
        # One that is patched was taken by an earlier patch of the model, or is served as a whole.
        if not is_patched(unit):
            _record_calls_of(unit, name, context, state)
    said = weakref.WeakMethod(state.lines)  # a report outlives its model
    report.live.append(lambda: say() if (say := said()) is not None else [])


def _record_calls_of(unit: nn.Module, name: str, context: ModelContext, state: graph_state.GraphState) -> None:
    original = partial(_forward_of, stock_class(unit))
    served: Served[Any, Any] = Served(
        NAME, name, None, _no_kernel, device_of(unit).type, original, context, state, Calls(), bind
    )
    take(unit, lambda base: with_forward(base, fast_unit, _MEMBERS), served)  # type: ignore[arg-type]


def _forward_of(base: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return base.forward(module, *args, **kwargs)


def _no_kernel(*_: torch.Tensor) -> None:
    raise AssertionError("a unit has no kernel of its own")
