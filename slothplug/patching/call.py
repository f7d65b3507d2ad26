"""The outermost call of a patched model: who is being called, with which labels, and what to do when it ends.

The patched model and its wrappers (PEFT's) get a private class that overrides ``__call__`` and leaves ``forward``
alone: the Trainer reads ``forward``'s signature, accelerate and TRL replace it, and autocast lives there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slothplug.patching.label_count import LabelCount
from slothplug.patching.private_class import private
from slothplug.patching.sites import STATE


class Call:
    """One outermost call in progress.

    Attributes:
        owner: the patch that the called model belongs to (``Served.owner`` of its modules).
        labels: what was passed as ``labels``; None where nothing was.
        label_count: how many of them count, on its way from the GPU; None where no served head will ask.
        failed: whether it ended by an exception.
        at_end: run in order when the call ends, also when it raises; each gets no argument.
    """

    __slots__ = ("__weakref__", "at_end", "failed", "label_count", "labels", "owner")

    def __init__(self, owner: Any, labels: torch.Tensor | None) -> None:
        self.owner, self.labels, self.failed = owner, labels, False
        self.label_count = LabelCount.start(labels) if owner.counts_labels else None
        self.at_end: list[Callable[[], None]] = []


class _Active(threading.local):
    call: Call | None = None


_active = _Active()


def current_call(owner: object) -> Call | None:
    """The outermost call in progress on this thread, if it is one of the patch ``owner``."""
    call = _active.call
    return call if call is not None and call.owner is owner else None


class Outermost:
    """State of a model, or of a wrapper around it, whose calls open a ``Call``."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Outermost:
        return Outermost(copy.deepcopy(self.owner, memo))


@functools.cache
def with_call(base: type[nn.Module]) -> type[nn.Module]:
    """The private subclass of ``base`` whose ``__call__`` opens a ``Call`` where none of its patch is open."""
    labels_at = _position_of_labels(base)
    plain_call = base.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain_call(self, *args, **kwargs)
        owner = self.__dict__[STATE].owner
        outer = _active.call
        if outer is not None and outer.owner is owner:
            return plain_call(self, *args, **kwargs)
        labels = kwargs.get("labels")
        if labels is None and labels_at is not None and len(args) > labels_at:
            labels = args[labels_at]
        call = _active.call = Call(owner, labels)
        try:
            return plain_call(self, *args, **kwargs)
        except BaseException:
            call.failed = True
            raise
        finally:
            _active.call = outer
            # Actions hold the call, and what it made: kept beyond its end, they would wait for the cycle collector.
            actions, call.at_end = call.at_end, []
            _run(actions, call.failed)

    return private(base, {"__call__": __call__})


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
