"""Walks over all modules of a patched model, as ``parameters()``, ``zero_grad()`` and ``train()`` are.

``nn.Module.named_modules`` is a generator inside a generator for each level, so every module of a PEFT model is handed
up some eight of them, and ``train`` calls itself for every module: 4 to 8 ms each for the 2,600 modules of an 8B shape,
and a step of transformers' Trainer takes five such walks. The list of modules changes once in a while at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain, repeat
from operator import attrgetter, contains

from torch import nn

from slothplug.patching.private_class import stock_class

_children, _attributes, _training = map(attrgetter, ("_modules", "__dict__", "training"))


class Walk:
    """What ``named_modules`` of a model gave. Modules that were removed since are not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        items = list(stock_class(model).named_modules(model))
        modules = [module for _, module in items]
        places = {id(module): place for place, module in enumerate(modules)}
        children = list(chain.from_iterable(module._modules.items() for module in modules))
        self._names = [name for name, _ in items]
        self._below = [weakref.ref(module) for module in modules[1:]]
        self._child_names = [name for name, _ in children]
        self._child_places = [places.get(id(child), len(modules)) for _, child in children]
        self._trains_plainly = all(map(trains_plainly, set(map(stock_class, modules[1:]))))

    def modules(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules, the model first; None where one was added, removed, replaced or renamed since."""
        found: list[nn.Module | None] = [model, *(reference() for reference in self._below)]
        if None in found:
            return None
        children = list(map(_children, found))
        then = list(map([*found, None].__getitem__, self._child_places))
        # Modules are equal only to themselves.
        same = list(chain.from_iterable(children)) == self._child_names
        same = same and list(chain.from_iterable(map(dict.values, children))) == then
        return found if same else None  # type: ignore[return-value]

    def named(self, modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """As ``named_modules`` without arguments."""
        return zip(self._names, modules, strict=True)

    def is_in_mode(self, modules: list[nn.Module], training: bool) -> bool:
        """Whether ``train(training)`` would change nothing."""
        plain = self._trains_plainly and not any(map(contains, map(_attributes, modules), repeat("train")))
        return plain and list(map(_training, modules)).count(training) == len(modules)


def trains_plainly(kind: type[nn.Module]) -> bool:
    """Whether ``train`` of a class sets the modes of the module and its children, and does nothing else."""
    return kind.train is nn.Module.train or kind.train.__module__ == "transformers.modeling_utils"
