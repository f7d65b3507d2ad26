"""The outermost call of a patched model: which model, with which labels, and what to do when the call ends.

The patched model and its wrappers (PEFT's) get a private class that overrides ``__call__`` and leaves ``forward``
alone: the Trainer reads ``forward``'s signature, accelerate and TRL replace it, and autocast lives there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slothplug.patching.eligibility import Binding, Guard
from slothplug.patching.model_context import ModelContext
from slothplug.patching.private_class import private
from slothplug.patching.served import STATE, Served
from slothplug.patching.walk import Walk, trains_plainly


@dataclass(eq=False, slots=True, weakref_slot=True)
class ForwardContext:
    """One outermost call in progress.

    Attributes:
        context: the patched model that is called.
        labels: the argument ``labels``; None where the call has none.
        keywords: the keyword arguments that the model is going to get; when the call begins, a shared state may replace
            values.
        binding: what the sweep found unchanged; None where each module decides for itself.
        notes: what shared states of the model keep for the length of this call, by state.
        failed: True if the call ended by an exception.
        at_end: run in order when the call ends, also when it raises; each gets no argument.
        recorded: True while a part of the model is recorded: what is computed belongs to the recording.
    """

    context: ModelContext
    labels: torch.Tensor | None
    keywords: dict[str, Any]
    binding: Binding | None
    notes: dict[object, Any] = field(default_factory=dict)
    failed: bool = False
    recorded: bool = False
    at_end: list[Callable[[], None]] = field(default_factory=list)


class _Active(threading.local):
    forward: ForwardContext | None = None


_active = _Active()


def current_forward(context: ModelContext) -> ForwardContext | None:
    """The outermost call in progress on this thread, if it is one of the patched model ``context``."""
    forward = _active.forward
    return forward if forward is not None and forward.context is context else None


@contextlib.contextmanager
def recorded_call(context: ModelContext) -> Iterator[None]:
    """For a part of the model that is being recorded: every module decides for itself, and shares nothing outside."""
    outer = _active.forward
    forward = _active.forward = ForwardContext(context, None, {}, None, recorded=True)
    try:
        yield
    finally:
        _active.forward = outer
        _run(forward.at_end, failed=True)


def facts_of(served: Served[Any, Any]) -> Any:
    """What the outermost call in progress may take for granted about a served module; None where nothing is.

    The answer is that of the operation's ``Bind``, a ``Refusal`` included.
    """
    forward = _active.forward
    if forward is None or forward.binding is None:
        return None
    return forward.binding.facts.get(served)


class Outermost:
    """State of a model, or of a wrapper around it, whose calls open a ``ForwardContext``."""

    __slots__ = ("_walk", "context", "guard")

    def __init__(self, context: ModelContext) -> None:
        self.context, self.guard = context, Guard()
        self._walk: Walk | None = None

    def walk(self, model: nn.Module) -> tuple[Walk, list[nn.Module]] | None:
        """The modules of ``model``, whose state this is; None where a class has a ``named_modules`` of its own."""
        if self._walk is not None and (modules := self._walk.modules(model)) is not None:
            return self._walk, modules
        walk = self._walk = Walk(model)
        modules = walk.modules(model)
        return None if modules is None else (walk, modules)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outermost:
        return Outermost(copy.deepcopy(self.context, memo))


@functools.cache
def with_call(base: type[nn.Module]) -> type[nn.Module]:
    """The private subclass of ``base`` whose ``__call__`` opens a ``ForwardContext`` where its model has none open.

    Walks over all of the model's modules take the list of the walk before, while it holds.
    """
    labels_at = _position_of_labels(base)

    def plain_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.__call__(self, *args, **kwargs)  # the one that it has now

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: Outermost | None = self.__dict__.get(STATE)
        if state is None or torch.compiler.is_compiling():
            return plain_call(self, *args, **kwargs)
        outer = _active.forward
        if outer is not None and outer.context is state.context:
            return plain_call(self, *args, **kwargs)
        labels = kwargs.get("labels")
        if labels is None and labels_at is not None and len(args) > labels_at:
            labels = args[labels_at]
        forward = _active.forward = ForwardContext(state.context, labels, kwargs, None)
        try:
            state.context.begin(forward)
            forward.binding = state.guard.check(self)
            return plain_call(self, *args, **kwargs)
        except BaseException:
            forward.failed = True
            raise
        finally:
            _active.forward = outer
            # Actions hold the context, and what it made: kept beyond its end, they would wait for the cycle collector.
            actions, forward.at_end = forward.at_end, []
            _run(actions, forward.failed)

    def named_modules(
        self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        found = None if memo is not None or prefix or not remove_duplicate else _walk_of(self)
        if found is None:
            return base.named_modules(self, memo, prefix, remove_duplicate)
        walk, modules = found
        return walk.named(modules)

    def train(self: Any, mode: bool = True) -> Any:
        found = _walk_of(self) if type(mode) is bool else None
        if found is not None:
            walk, modules = found
            if walk.is_in_mode(modules, mode):
                return self
        return base.train(self, mode)

    members = {"__call__": __call__, "named_modules": named_modules}
    return private(base, members | ({"train": train} if trains_plainly(base) else {}))


def _walk_of(model: nn.Module) -> tuple[Walk, list[nn.Module]] | None:
    """The walk of a model that is patched, outside of what a compiler traces."""
    state: Outermost | None = model.__dict__.get(STATE)
    return None if state is None or torch.compiler.is_compiling() else state.walk(model)


def _run(actions: list[Callable[[], None]], failed: bool) -> None:
    """Runs every action; then raises what the first failing one raised, unless the call has its own exception."""
    errors = []
    for action in actions:
        try:
            action()
        except Exception as error:
            errors.append(error)
    if errors and not failed:
        raise errors[0]


def _position_of_labels(base: type[nn.Module]) -> int | None:
    names = list(inspect.signature(base.forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None
