"""From what a user holds to the model inside: DDP, FSDP, DeepSpeed, torch.compile and PEFT wrappers."""

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
"""The wrapper classes of engines by name, so that none is imported for a look, and where they hold the model."""


def wrappers_and_core(model: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The PEFT wrappers around a model, outermost first, and the model itself.

    Engines' wrappers (DDP, FSDP1, DataParallel, DeepSpeed's engine, torch.compile) are passed through and not returned:
    what they call is returned, so whatever opens a call inside them is seen.
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
    """What an engine's wrapper, or one of a class derived from it, calls; None where ``model`` is no such wrapper."""
    attribute = next((_ENGINES[base.__name__] for base in type(model).__mro__ if base.__name__ in _ENGINES), None)
    return getattr(model, attribute) if attribute is not None else None


def _inside_peft(model: nn.Module) -> nn.Module | None:
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    inner = model.get_base_model()
    return inner if inner is not model else None
