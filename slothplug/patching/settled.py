"""Whether all that a module's forward reads beside tensors is what it was when the module was recognised.

What counts is content: a dictionary or a configuration that is changed in place is a change. Of an object only the
attributes that the forward's code mentions are compared, so that ``config.use_cache = False`` is no change for a norm.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import repeat
from operator import getitem, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.patching.fingerprint import attributes_of, same_items, same_value
from slothplug.patching.forward_code import code_of, forward_code, members_mentioned
from slothplug.patching.private_class import stock_class
from slothplug.patching.rebind_globals import global_names
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import UNWATCHED, Reads

_CONSTANT = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, BuiltinFunctionType, FunctionType, MethodType, partial, property, cached_property,
    staticmethod, classmethod,
)  # fmt: skip
"""Types whose values do not change: identity or equality says all."""

_CONTENT_UNKNOWN = (torch.Tensor, nn.Module, set, bytearray, deque)
"""Types whose values can change without a trace that could be compared cheaply."""

_DEEPEST = 4
"""How many objects deep contents are compared."""


class _Read(NamedTuple):
    """One item of a namespace. ``content`` is None where the value cannot change in place."""

    key: str
    value: Any
    content: _Content | None = None


class _Content(NamedTuple):
    """What a mutable value held: a copy of a container, or the items of an object's namespace that matter."""

    copy: dict[Any, Any] | list[Any] | tuple[Any, ...] | None = None
    items: tuple[_Read, ...] = ()
    absent: tuple[str, ...] = ()
    """Names that are mentioned and are not in the object's namespace."""


class _Unknown(Exception):
    """A value whose content cannot be compared; its argument describes the value."""


class SettledItems:
    """Whether items of namespaces are what they were: globals, class attributes, captured variables, attributes."""

    def __init__(
        self, reads: Iterable[tuple[Any, _Read]], absent: Iterable[tuple[Mapping[str, Any], Iterable[str]]] = ()
    ) -> None:
        """``reads`` are pairs of a namespace and an item of it, ``absent`` of a namespace and names not in it."""
        self._spaces: list[Any] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._absent = [(space, frozenset(names)) for space, names in absent]
        for space, read in reads:
            self._add(space, read)

    def _add(self, space: Any, read: _Read) -> None:
        self._spaces.append(space)
        self._keys.append(read.key)
        self._values.append(read.value)
        if read.content is None:
            return
        if read.content.copy is not None:
            self._containers.append(read.value)
            self._copies.append(read.content.copy)
            return
        # These hold for as long as the value, which is compared above, is the same object.
        inner = vars(read.value)
        self._absent.append((inner, frozenset(read.content.absent)))
        for item in read.content.items:
            self._add(inner, item)

    @classmethod
    def of_forward(cls, owner: type[nn.Module], links: Iterable[FunctionType]) -> SettledItems:
        """For a forward that is still called, in a copy: the class's ``forward``, and which objects the globals of the
        functions in its closure chain are. What these objects hold is read when the copy is called."""
        spaces: list[tuple[Any, str]] = [
            (function.__globals__, name)
            for function in links
            for name in sorted(global_names(function) & function.__globals__.keys())
        ]
        bases = [vars(base) for base in owner.__mro__[: owner.__mro__.index(nn.Module)]]
        first = next(index for index, base in enumerate(bases) if "forward" in base)
        return cls(
            ((space, _read(space, name, None)) for space, name in (*spaces, (bases[first], "forward"))),
            ((base, ("forward",)) for base in bases[:first]),
        )

    @classmethod
    def of_function(cls, function: FunctionType) -> SettledItems | Refusal:
        """For a function that belongs to no module; a refusal where what it reads cannot be compared later."""
        code = code_of(function)
        try:
            return cls((space, _read(space, name, code.names)) for space, name in code.namespaces)
        except _Unknown as unknown:
            return Refusal(f"reads {unknown}, whose changes would go unnoticed")

    def __deepcopy__(self, memo: object) -> SettledItems:
        # Globals and classes are the same for a copy; Settled makes the items of a copied attribute anew.
        return self

    def __add__(self, other: SettledItems) -> SettledItems:
        both = SettledItems(())
        for name, mine in vars(self).items():
            vars(both)[name] = mine + vars(other)[name]
        return both

    def fits(self, reads: Reads = UNWATCHED) -> bool:
        reads.items(self._spaces, self._keys)
        try:
            if not _same(self._spaces, self._keys, self._values):
                return False
        except KeyError:
            return False
        for space, names in self._absent:
            reads.items(repeat(space), names)
            if not space.keys().isdisjoint(names):
                return False
        return not self._containers or all(map(partial(_same_content, reads), self._containers, self._copies))

    def numbers(self) -> Iterator[float]:
        """The numbers among the items, those of Python modules left out."""
        for space, value in zip(self._spaces, self._values, strict=True):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and "__spec__" not in space:
                yield float(value)


class Settled:
    """Whether a module is still of its class and its forward reads what it read.

    Deep-copied in one go with the module, it fits the copy. It fits other modules of equal ``fingerprint`` too.
    """

    def __init__(
        self, kind: type[nn.Module], attributes: tuple[_Read, ...], absent: frozenset[str], elsewhere: SettledItems
    ) -> None:
        """``attributes`` are those of the instance, ``absent`` names that it has not, ``elsewhere`` is read by the code
        of its class."""
        self._type, self._attributes, self._absent, self._elsewhere = kind, attributes, absent, elsewhere
        containers = {
            read.key: read.content.copy for read in attributes if read.content and read.content.copy is not None
        }
        self._copies = containers
        self._names = [read.key for read in attributes if read.key not in containers]
        self._values = [read.value for read in attributes if read.key not in containers]
        own = {read.key: read.value for read in attributes}
        self._objects = SettledItems((own, read) for read in attributes if read.content and read.content.copy is None)

    @classmethod
    def of(cls, module: nn.Module, free: str | None = None) -> Settled | Refusal:
        """What the module's forward reads now; a refusal where that cannot be compared later.

        ``free`` names an attribute that may change.
        """
        kind = stock_class(module)
        code = forward_code(kind, vars(module))
        own = {name: value for name, value in attributes_of(module) if name not in (free, "training")}
        bases = [vars(base) for base in kind.__mro__[: kind.__mro__.index(nn.Module)]]
        names = code.names | {"forward"}
        spaces = [*code.namespaces, *((base, name) for base in bases for name in sorted(names & base.keys()))]
        try:
            attributes = tuple(_read(own, name, code.names if name in code.names else None) for name in own)
            elsewhere = SettledItems(
                [(space, _read(space, name, code.names)) for space, name in spaces],
                [(base, names - base.keys()) for base in bases],
            )
        except _Unknown as unknown:
            return Refusal(f"its forward reads {unknown}, whose changes would go unnoticed")
        # Replicas of nn.DataParallel hold their weights as plain attributes.
        absent = code.names.difference(vars(module), module._parameters, module._buffers, module._modules)
        return cls(kind, attributes, absent, elsewhere)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settled:
        # Classes and globals are the same for a copy.
        return Settled(self._type, copy.deepcopy(self._attributes, memo), self._absent, self._elsewhere)

    def fits(self, module: nn.Module, reads: Reads = UNWATCHED) -> bool:
        own = module.__dict__
        reads.size(own)  # stands for the names that are absent
        reads.items(repeat(own), self._names)
        reads.items(repeat(own), self._copies)
        try:
            return (
                stock_class(module) is self._type
                and _same(repeat(own), self._names, self._values)
                and own.keys().isdisjoint(self._absent)
                and all(_same_content(reads, own[name], copied) for name, copied in self._copies.items())
                and self._objects.fits(reads)
                and self._elsewhere.fits(reads)
            )
        except KeyError:
            return False

    def numbers(self) -> Iterator[float]:
        """The numbers that the forward reads from elsewhere than the module's own attributes."""
        yield from self._elsewhere.numbers()
        yield from self._objects.numbers()


def _read(space: Mapping[str, Any], name: str, names: frozenset[str] | None, depth: int = 0) -> _Read:
    """The item ``name`` of a namespace, with its content where ``names`` are mentioned by code that reaches it."""
    value = space[name]
    try:
        return _Read(name, value, None if names is None else _content(value, names, depth))
    except _Unknown as unknown:
        inner = unknown.args[0]
        raise _Unknown(f"{name}{inner}" if inner[0] in ".," else f"{name}, {inner}") from None


def _content(value: Any, names: frozenset[str], depth: int) -> _Content | None:
    """Raises ``_Unknown`` where what the value holds cannot be compared."""
    if isinstance(value, _CONSTANT) or (isinstance(value, ModuleType) and depth == _DEEPEST):
        return None
    if isinstance(value, (dict, list, tuple)):
        return _Content(copy=_copied(value))
    if isinstance(value, _CONTENT_UNKNOWN) or hasattr(type(value), "__slots__") or depth == _DEEPEST:
        raise _Unknown(f", a {type(value).__name__}")
    if not hasattr(value, "__dict__"):
        return None
    space = vars(value)
    if isinstance(value, ModuleType):
        return _Content(items=tuple(_read(space, name, names, depth + 1) for name in sorted(names & space.keys())))
    return _object_content(value, members_mentioned(type(value), names), depth)


def _object_content(value: object, names: frozenset[str], depth: int) -> _Content:
    space = vars(value)
    # transformers' configurations answer to other names than they store an attribute under.
    aliases = getattr(value, "attribute_map", {})
    keys = {aliases.get(name, name) for name in names}
    try:
        items = tuple(_read(space, key, names, depth + 1) for key in sorted(keys & space.keys()))
    except _Unknown as unknown:
        raise _Unknown(f".{unknown.args[0]}") from None
    return _Content(items=items, absent=tuple(keys - space.keys()))


def _copied(value: Any) -> Any:
    """Containers are copied as plain ones; what is in them must be constant."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in dict.items(value)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copied, value))
    if isinstance(value, (*_CONSTANT, ModuleType)):
        return value
    raise _Unknown(f", which holds a {type(value).__name__}")


def _same_content(reads: Reads, container: Any, copied: Any) -> bool:
    same = same_items(container, copied)
    if same:
        reads.content(container, copied)
    return same


def _same(spaces: Iterable[Any], keys: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether the items are the same objects, or equal plain values."""
    return all(map(is_, map(getitem, spaces, keys), values)) or all(
        same_value(space[key], value) for space, key, value in zip(spaces, keys, values, strict=False)
    )
