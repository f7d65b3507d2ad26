"""Eligibility, decided once for each outermost call: one sweep over what the decisions were made from.

A served module whose operation has a ``Bind`` is asked once what its calls may take for granted: which adapter is
active, which tensors it multiplies by, that nobody put hooks on it. The operation reads every mutable thing that its
answer depends on through a ``Watch``. What the watches of a whole model saw is a ``Binding``. When the model is called,
the ``Guard`` compares all of it with what is there now, in a few passes that run in C, and the answers stand exactly
while nothing differs. A ``Binding`` is never changed: two calls that have the same one found the same state.

Nothing is bound in a recompute or where a part of the model is called by itself, since no outermost call is in progress
there, and nothing where foreign code runs inside the call and may change the model: hooks, or forwards of the user's
own. Modules decide for themselves then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, contains, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.patching.fingerprint import same_items
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import STATE, Served
from slothplug.patching.transforms import why_not_now
from slothplug.patching.watch import Watch

logger = logging.getLogger("slothplug")

_INERT = ("transformers.", "torch.", "peft.", "bitsandbytes.", "accelerate.", "trl.", "slothplug.")
"""Forwards and hooks from these packages do not change what a served module is while the model is being called."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that nobody calls, so that hooks on them never run."""


class Binding:
    """The state of a model in which its modules' facts hold.

    Attributes:
        facts: what each served module's ``Bind`` answered. A binding refers to the modules' own ``__dict__``: a
            module's state that referred to the binding would close a cycle, which keeps a deleted model's memory.
    """

    def __init__(self, watch: Watch, facts: dict[Served[Any, Any], Any]) -> None:
        self.facts = facts
        self._watch = watch
        self._addresses = [tensor.data_ptr() for tensor in watch._tensors]
        self._dtypes = [tensor.dtype for tensor in watch._tensors]

    def holds(self) -> bool:
        """Whether everything is what it was when the facts were bound. Reads only; no device is asked."""
        seen = self._watch
        try:
            return (
                all(map(is_, map(getitem, seen._containers, seen._keys), seen._values))
                and not any(seen._empty)
                and list(map(len, seen._sized)) == seen._sizes
                and all(map(is_, map(type, seen._objects), seen._types))
                and not any(map(contains, seen._without, seen._absent))
                and all(map(same_items, seen._mutable, seen._copies))
                and list(map(_address, seen._tensors)) == self._addresses
                and list(map(_dtype, seen._tensors)) == self._dtypes
                and list(map(_requires_grad, seen._flagged)) == seen._flags
            )
        except (KeyError, IndexError):  # something that was read is gone
            return False


_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")
_requires_grad = attrgetter("requires_grad")


class Guard:
    """Gives each outermost call of one root, a patched model or a wrapper of it, the binding that holds for it."""

    __slots__ = ("_binding", "_obstacle")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops the binding, for a patch that serves more modules than before."""
        self._binding: Binding | None = None
        self._obstacle: Obstacle | None = None

    def check(self, root: nn.Module) -> Binding | None:
        """The binding for a call of ``root``; None where modules are to decide for themselves."""
        # Under a transform of torch.func the weights are wrappers without memory.
        if "_is_replica" in root.__dict__ or torch_module._has_any_global_hook() or why_not_now():
            return None
        if _runs_foreign_code(root) or (self._obstacle is not None and self._obstacle()):
            return None
        if self._binding is not None and self._binding.holds():
            return self._binding
        self._binding = None
        found = _bind(root)
        self._binding, self._obstacle = (found, None) if isinstance(found, Binding) else (None, found)
        return self._binding


Obstacle = Callable[[], bool]
"""Whether that which kept a model from being bound still stands in the way."""


def _bind(root: nn.Module) -> Binding | Obstacle:
    """Asks every served module below ``root`` for its facts; an ``Obstacle`` where foreign code runs inside a call."""
    watch = Watch()
    facts: dict[Served[Any, Any], Any] = {}
    for module in root.modules():
        own = module.__dict__
        if type(module) not in _CONTAINERS:
            for hooks in (own["_forward_pre_hooks"], own["_forward_hooks"]):
                if watch.empty(hooks):
                    continue
                if _has_foreign(hooks):
                    return partial(_has_foreign, hooks)
                watch.content(hooks, dict(hooks))
            if module is not root:  # which refers to its guard, and is asked at every call
                if _runs_foreign_code(module):
                    return partial(_runs_foreign_code, module)
                watch.absent(own, "forward")
                watch.type_of(module)
        for name, child in own["_modules"].items():
            served = None if child is None else child.__dict__.get(STATE)
            if isinstance(served, Served) and served.bind is not None:
                watch.item(own["_modules"], name)
                try:
                    facts[served] = served.bind(child, served, watch)
                except Exception:
                    logger.exception("slothplug: bind of %s failed at %s, which decides on every call", served.op, name)
    return Binding(watch, facts) if facts else lambda: True


def _has_foreign(hooks: Mapping[int, Any]) -> bool:
    return not all(map(_is_inert, hooks.values()))


def _runs_foreign_code(module: nn.Module) -> bool:
    """True if a module's forward is written by somebody who may change the model inside a call."""
    return not (_is_inert(stock_class(module).forward) and _is_inert(module.__dict__.get("forward", _is_inert)))


def _is_inert(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_INERT)
