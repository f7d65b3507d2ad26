"""Finds the model inside the wrappers of DDP, FSDP, DeepSpeed, torch.compile and PEFT."""

from __future__ import annotations

import sys

from torch import nn

_ENGINES = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}
"""Names of the engines' wrapper classes, so that no engine is imported, and the attribute that holds the model."""


def wrappers_and_core(model: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The PEFT wrappers around a model, outermost first, and the model itself.

    Engines' wrappers (DDP, FSDP1, DataParallel, DeepSpeed's engine, torch.compile) are not returned: they call what
    they wrap, so the calls of the PEFT wrapper or the model inside are seen.
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
    """The module that an engine's wrapper calls; None if ``model`` is not an instance of a wrapper class."""
    attribute = next((_ENGINES[base.__name__] for base in type(model).__mro__ if base.__name__ in _ENGINES), None)
    return getattr(model, attribute) if attribute is not None else None


def _inside_peft(model: nn.Module) -> nn.Module | None:
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    inner = model.get_base_model()
    return inner if inner is not model else None
