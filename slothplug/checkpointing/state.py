"""Which modules of a patched model are checkpointed, and what is done about it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from slothplug.checkpointing.one_pass import OnePass, in_one_pass, why_not_cut_short
from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.private_class import replace_attribute

FUNCTION = "_gradient_checkpointing_func"


class CheckpointingState(SharedState):
    """The modules of one patched model that may be checkpointed.

    Attributes:
        refused: the function that was left to a module, and why.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.refused: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str]] = weakref.WeakKeyDictionary()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Modules whose function is looked at from now on."""
        self._modules.update(modules)

    def begin(self, forward: ForwardContext) -> None:
        for module in self._modules:
            given = module.__dict__.get(FUNCTION)
            if given is not None and type(given) is not OnePass:
                self._take_over(module, given)

    def _take_over(self, module: nn.Module, given: Any) -> None:
        known, _ = self.refused.get(module, (None, ""))
        ours = in_one_pass(given)
        if known is given or ours is None:
            return
        if refusal := why_not_cut_short(module):
            self.refused[module] = given, refusal.reason
        else:
            replace_attribute(module, FUNCTION, ours)

    def lines(self) -> list[str]:
        """Sentences for the report; none while nothing is checkpointed that we know."""
        taken = sum(type(module.__dict__.get(FUNCTION)) is OnePass for module in self._modules)
        what = "the recompute ends with the last tensor that the backward reads"
        lines = [f"checkpointing: taken over from {taken} modules; {what}"] if taken else []
        left = Counter(reason for _, reason in self.refused.values())
        return lines + [f"checkpointing: left to {count} modules as it is: {why}" for why, count in left.items()]
