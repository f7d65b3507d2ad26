"""What a served module carries in its ``__dict__``: all that its fast forward needs beside the module itself."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from slothplug.patching.model_context import ModelContext, SharedState
from slothplug.patching.sites import Bind, Refusal, Spec

STATE = "_slothplug"
"""Key in a served module's ``__dict__`` under which its ``Served`` lies."""

Shared = TypeVar("Shared", bound="SharedState | None")


@dataclass
class Calls:
    """How often a site was asked, and what it answered with. Shared by a module and its copies."""

    served: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls answered by the original forward, by reason."""
    remarks: Counter[str] = field(default_factory=Counter)
    """Served calls after which something slower was computed than need be, by reason."""
    collected: int = 0
    """Served calls whose output a sibling's call had computed."""

    def serve(self, output: torch.Tensor) -> torch.Tensor:
        """Counts a served call and returns its output."""
        self.served += 1
        return output


@dataclass(eq=False, slots=True)
class Served(Generic[Spec, Shared]):
    """State of one served module.

    Attributes:
        op: the operation's name.
        name: the module's qualified name in the model that was patched.
        spec: what the site's finder learned about this module.
        kernel: the kernel's differentiable function.
        device_type: the device type that the kernel serves; other inputs go to the original forward.
        original: the stock class's ``forward``, unbound.
        context: the patched model that this module belongs to; the same for all its modules, another in its copies.
        shared: what the operation's modules of that model share; None where they share nothing.
        calls: counters.
        bind: the operation's ``Bind``, or None.
    """

    op: str
    name: str
    spec: Spec
    kernel: Callable[..., Any]
    device_type: str
    original: Callable[..., Any]
    context: ModelContext
    shared: Shared
    calls: Calls
    bind: Bind | None = None

    def fall_back(self, module: nn.Module, refusal: Refusal, *args: Any, **kwargs: Any) -> Any:
        """Answers a call with the original forward and counts why."""
        self.calls.fallbacks[refusal.reason] += 1
        return self.original(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Served[Spec, Shared]:
        # A copy of a whole model has a context of its own. A copy of one module, as PEFT's modules_to_save, stays in
        # the model.
        context = memo.get(id(self.context), self.context)
        shared: Any = None if self.shared is None else context.shared(type(self.shared))
        return replace(self, spec=copy.deepcopy(self.spec, memo), context=context, shared=shared)
