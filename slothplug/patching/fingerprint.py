"""What a module's behaviour depends on beside its tensors: ``fingerprint`` says whether two modules have the same
attributes, ``Settled`` whether one module still has those that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from slothplug.patching.private_class import LEDGER, stock_class
from slothplug.patching.served import STATE

_BARE_MODULE = frozenset(nn.Module().__dict__) - {"training"} | {STATE, LEDGER}
_VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


def fingerprint(module: nn.Module) -> Hashable:
    """Every attribute of the instance itself, plain values by value and objects by identity."""
    return tuple((name, _fingerprint(value)) for name, value in _attributes(module))


class Settled:
    """Whether a module is still of its class and has the attributes that it had; one that came since does not count.

    Copied or pickled in one go with the module, it fits the copy.
    """

    __slots__ = ("attributes", "type")

    def __init__(self, module: nn.Module, free: str | None = None) -> None:
        """``free`` names an attribute that may change."""
        self.type = stock_class(module)
        self.attributes = tuple(item for item in _attributes(module) if item[0] not in (free, "training"))

    def fits(self, module: nn.Module) -> bool:
        if stock_class(module) is not self.type:
            return False
        now = module.__dict__
        for name, value in self.attributes:
            found = now.get(name, _MISSING)
            if found is not value and _fingerprint(found) != _fingerprint(value):
                return False
        return True


_MISSING = object()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _BARE_MODULE)


def _fingerprint(value: object) -> Hashable:
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_fingerprint, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _fingerprint(item)) for key, item in value.items())
    return _Identity(value)


class _Identity:
    """Equal to another of the same object alone. Keeps no object alive that can be referred to weakly."""

    __slots__ = ("hash", "object")

    def __init__(self, value: object) -> None:
        self.hash = id(value)
        self.object: Callable[[], object]
        try:
            self.object = weakref.ref(value)
        except TypeError:
            self.object = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        value = self.object()
        return self is other or (value is not None and value is other.object())

    def __hash__(self) -> int:
        return self.hash
