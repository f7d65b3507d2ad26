"""Gradient checkpointing: the recompute makes what the backward reads, and nothing else.

transformers hands the call of a checkpointed layer to the function that lies in ``_gradient_checkpointing_func`` of the
layer, or of the model in older releases. Trainers put it there when training begins, so it is looked at whenever the
model is called:

    the function of each module (state)  ->  torch's reentrant checkpoint is replaced by the other kind (one_pass)

Every other function stays: what it does is not known here.
"""

from __future__ import annotations

import weakref

from torch import nn

from slothplug.checkpointing.state import CheckpointingState
from slothplug.hookspecs import hookimpl
from slothplug.patching.report import Report
from slothplug.patching.served import STATE, Served


@hookimpl
def slothplug_after_patch(model: nn.Module, report: Report) -> None:
    served = (part.__dict__.get(STATE) for part in model.modules())
    context = next((one.context for one in served if isinstance(one, Served)), None)
    if context is None or report.settings.checkpointing == "off":
        return
    state = context.shared(CheckpointingState)
    state.watch(module for module in model.modules() if hasattr(module, "gradient_checkpointing"))
    said = weakref.WeakMethod(state.lines)  # a report outlives its model
    report.live.append(lambda: say() if (say := said()) is not None else [])
