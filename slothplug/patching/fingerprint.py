"""Whether two modules have the same attributes, their tensors aside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from slothplug.patching.private_class import LEDGER
from slothplug.patching.served import STATE

_BARE_MODULE = frozenset(nn.Module().__dict__) - {"training"} | {STATE, LEDGER}
_VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


def fingerprint(module: nn.Module) -> Hashable:
    """Every attribute of the instance itself, plain values by value and objects by identity."""
    return tuple((name, _fingerprint(value)) for name, value in attributes_of(module))


def same_value(one: object, other: object) -> bool:
    """True for plain values of one type that are equal, containers of such, and for one and the same object."""
    return one is other or _fingerprint(one) == _fingerprint(other)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that the instance has beside those of every ``nn.Module``; ``training`` is among them."""
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


def same_items(found: object, copy: Any) -> bool:
    """Whether ``found`` has the items of ``copy``, a plain container; overridden comparisons are ignored."""
    plain: Any = type(copy)
    return isinstance(found, plain) and plain.__eq__(found, copy) is True
