"""Shared context of one patched model; the state of every served module refers to it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from slothplug.settings import Settings

if TYPE_CHECKING:
    from slothplug.patching.forward_context import ForwardContext


class SharedState:
    """What one operation's served modules of a patched model share. An operation declares a subclass."""

    def begin(self, forward: ForwardContext) -> None:
        """Called when an outermost call of the model begins, before the model computes anything."""


State = TypeVar("State", bound=SharedState)


class ModelContext:
    """Identity of one patched model, and what its operations share. A deep copy of the model has one of its own.

    Attributes:
        settings: of the patch.
        outermost: the model and the wrappers around it whose calls open a ``ForwardContext``.
    """

    __slots__ = ("_shared", "outermost", "settings")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._shared: dict[type[SharedState], SharedState] = {}

    def shared(self, kind: type[State]) -> State:
        """The model's only instance of ``kind``, made when it is first asked for."""
        state = self._shared.get(kind)
        if state is None:
            state = self._shared[kind] = kind()
        assert isinstance(state, kind)
        return state

    def begin(self, forward: ForwardContext) -> None:
        for state in self._shared.values():
            state.begin(forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelContext:
        return ModelContext(self.settings)
