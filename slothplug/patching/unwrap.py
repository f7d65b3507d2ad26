"""From what a user holds to the model inside: DDP, FSDP, torch.compile and PEFT wrappers."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrappers_and_core(model: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The PEFT wrappers around a model, outermost first, and the model itself.

    Engines' wrappers (DDP, FSDP1, DataParallel, torch.compile) are passed through and not returned: what they call is
    returned, so whatever opens a call inside them is seen.
    """
    wrappers: list[nn.Module] = []
    while True:
        inner = _inside_engine(model)
        if inner is not None:
            model = inner
            continue
        adapted = _inside_peft(model)
        if adapted is None:
            return wrappers, model
        wrappers.append(model)
        model = adapted


def _inside_engine(model: nn.Module) -> nn.Module | None:
    inner: Any = None
    if (
        isinstance(model, (DistributedDataParallel, nn.DataParallel))
        or type(model).__name__ == "FullyShardedDataParallel"
    ):
        inner = model.module
    elif type(model).__name__ == "OptimizedModule":
        inner = model._orig_mod
    return inner


def _inside_peft(model: nn.Module) -> nn.Module | None:
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    inner = model.get_base_model()
    return inner if inner is not model else None
