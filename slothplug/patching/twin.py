"""Twins: stand-ins of a module's own class and configuration on which a probe may do what it likes.

What a twin shows holds for every module of the same class and attributes, for as long as they stay: ``fingerprint``
says whether two modules have the same, ``Settled`` whether one module still has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import STATE

Module = TypeVar("Module", bound=nn.Module)

_BARE_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


def twin(module: Module, dtype: torch.dtype, children: Mapping[str, nn.Module] | None = None) -> Module:
    """A module of the stock class of ``module`` with its attributes, fresh random weights, no hooks and no ``forward``.

    Methods of the original among its attributes become the twin's. Own parameters have the original's shapes and
    devices, ``dtype``, and values drawn around 1 (so that a norm's weight matters); buffers are copied. Children are
    shared unless ``children`` names a replacement. Nothing that the twin does to its parameters, buffers or flags
    reaches the original.
    """
    double: Any = object.__new__(stock_class(module))
    for key, value in module.__dict__.items():
        if key not in (STATE, "forward"):
            of_original = isinstance(value, MethodType) and value.__self__ is module
            double.__dict__[key] = MethodType(value.__func__, double) if of_original else value
    for key, value in nn.Module().__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            double.__dict__[key] = type(value)()
    double.__dict__["_parameters"] = {
        name: None if parameter is None else _random_like(parameter, dtype)
        for name, parameter in module._parameters.items()
    }
    double.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()
    }
    double.__dict__["_modules"] = {**module._modules, **(children or {})}
    return double


def _random_like(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    values = torch.empty(parameter.shape, device=parameter.device).uniform_(0.5, 1.5)
    return nn.Parameter(values.to(dtype))


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
    return ((name, value) for name, value in vars(module).items() if name not in _BARE_MODULE and name != STATE)


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
