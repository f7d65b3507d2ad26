"""The Hugging Face ``Trainer`` and TRL's trainers: a callback, arguments with the flag, and the front door.

Importing this changes nothing. ``FastKernelsCallback`` changes the model of its trainer and nothing else. Constructing
``TrainingArguments(use_fast_kernels=...)`` with the flag on, and ``frontdoor.install()``, wrap what
``slothplug.integrations.hf.frontdoor`` lists.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slothplug.integrations.hf.arguments import TrainingArguments
    from slothplug.integrations.hf.callback import FastKernelsCallback

__all__ = ["FastKernelsCallback", "TrainingArguments"]

_HOMES = {"FastKernelsCallback": "callback", "TrainingArguments": "arguments"}


def __getattr__(name: str) -> Any:
    # On first use: the front door is imported while transformers.trainer, which these need, is still half imported.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
