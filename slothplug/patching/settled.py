"""Whether all that a module's forward reads beside tensors is what it was when the module was recognised.

What counts is content: a dictionary or a configuration that is changed in place is a change. Of an object only the
attributes that the forward's code mentions are compared, so that ``config.use_cache = False`` is no change for a norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from operator import getitem, is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slothplug.patching.fingerprint import attributes_of, same_value
from slothplug.patching.forward_code import ForwardCode, code_of, forward_code, members_mentioned
from slothplug.patching.private_class import stock_class
from slothplug.patching.rebind_globals import global_names
from slothplug.patching.sites import Refusal

if TYPE_CHECKING:
    from slothplug.patching.eligibility import Watch

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


class _Absent:
    """Stands for the value of an attribute that is not there. The class itself is the value: copies leave it alone."""


class _Read(NamedTuple):
    """One item of a namespace. ``content`` is None where the value cannot change in place."""

    key: str
    value: Any
    content: _Content | None = None


class _Content(NamedTuple):
    """What a mutable value held: a copy of a container, or the items of an object's namespace that matter."""

    copy: dict[Any, Any] | list[Any] | tuple[Any, ...] | None = None
    items: tuple[_Read, ...] = ()


class _Unknown(Exception):
    """A value whose content cannot be compared; its argument describes the value."""


class SettledCode:
    """Whether the globals, class attributes and captured variables that functions read are what they were.

    Copies of a module share it: none of these is copied with a module.
    """

    def __init__(
        self, reads: Iterable[tuple[Any, _Read]], absent: Iterable[tuple[Mapping[str, Any], frozenset[str]]] = ()
    ) -> None:
        """``reads`` are pairs of a namespace and an item of it, ``absent`` of a namespace and names not in it."""
        self._reads, self._absent = tuple(reads), tuple(absent)
        constant = [(space, read) for space, read in self._reads if read.content is None]
        self._spaces, self._keys = [space for space, _ in constant], [read.key for _, read in constant]
        self._values = [read.value for _, read in constant]
        self._mutable = [(space, read) for space, read in self._reads if read.content is not None]

    @classmethod
    def names_in(cls, functions: Iterable[FunctionType]) -> SettledCode:
        """For functions that go on reading their globals themselves: which objects these are, not what they hold."""
        return cls(
            (function.__globals__, _read(function.__globals__, name, None))
            for function in functions
            for name in sorted(global_names(function) & function.__globals__.keys())
        )

    @classmethod
    def of_functions(cls, functions: Iterable[FunctionType]) -> SettledCode | Refusal:
        """For functions that belong to no module; a refusal where what they read cannot be compared later."""
        codes = [code_of(function) for function in functions]
        try:
            return cls((space, _read(space, name, code.names)) for code in codes for space, name in code.namespaces)
        except _Unknown as unknown:
            return Refusal(f"reads {unknown}, whose changes would go unnoticed")

    def __add__(self, other: SettledCode) -> SettledCode:
        return SettledCode(self._reads + other._reads, self._absent + other._absent)

    def __deepcopy__(self, memo: object) -> SettledCode:
        return self

    def fits(self) -> bool:
        try:
            unchanged = all(map(is_, map(getitem, self._spaces, self._keys), self._values))
        except KeyError:
            return False
        reads = self._mutable if unchanged else self._reads
        return all(_holds(space, read) for space, read in reads) and all(
            space.keys().isdisjoint(names) for space, names in self._absent
        )

    def watch(self, watch: Watch) -> bool:
        """``fits()``; notes all that the answer depends on."""
        for space, read in self._reads:
            _note(watch, space, read)
        for space, names in self._absent:
            for name in names:
                watch.absent(space, name)
        return self.fits()

    def numbers(self) -> Iterator[float]:
        """The numbers among what is read."""
        return _numbers(read for _, read in self._reads)


class Settled:
    """Whether a module is still of its class and its forward reads what it read.

    Deep-copied in one go with the module, it fits the copy. It fits other modules of equal ``fingerprint`` too.

    Attributes:
        names: the names that the forward's code mentions.
    """

    def __init__(self, module: nn.Module, code: ForwardCode, free: str | None) -> None:
        self.type, self.names = stock_class(module), code.names
        attributes = [(name, value) for name, value in attributes_of(module) if name not in (free, "training")]
        own = dict(attributes)
        self._reads = tuple(_read(own, name, code.names if name in code.names else None) for name in own)
        # Replicas of nn.DataParallel hold their weights as plain attributes.
        self._absent = code.names.difference(vars(module), module._parameters, module._buffers, module._modules)
        bases = [vars(base) for base in self.type.__mro__[: self.type.__mro__.index(nn.Module)]]
        names = code.names | {"forward"}
        spaces = [*code.namespaces, *((base, name) for base in bases for name in sorted(names & base.keys()))]
        self._code = SettledCode(
            [(space, _read(space, name, code.names)) for space, name in spaces],
            [(base, names - base.keys()) for base in bases],
        )

    @classmethod
    def of(cls, module: nn.Module, free: str | None = None) -> Settled | Refusal:
        """What the module's forward reads now; a refusal where that cannot be compared later.

        ``free`` names an attribute that may change.
        """
        try:
            return cls(module, forward_code(stock_class(module), vars(module)), free)
        except _Unknown as unknown:
            return Refusal(f"its forward reads {unknown}, whose changes would go unnoticed")

    def fits(self, module: nn.Module) -> bool:
        own = module.__dict__
        return (
            stock_class(module) is self.type
            and all(_holds(own, read) for read in self._reads)
            and own.keys().isdisjoint(self._absent)
            and self._code.fits()
        )

    def watch(self, module: nn.Module, watch: Watch) -> bool:
        """``fits(module)``; notes all that the answer depends on."""
        watch.type_of(module)
        watch.size(module.__dict__)
        for read in self._reads:
            _note(watch, module.__dict__, read)
        return self._code.watch(watch) and self.fits(module)

    def numbers(self) -> Iterator[float]:
        """The numbers that the forward reads from elsewhere than the module's own attributes."""
        yield from self._code.numbers()
        for read in self._reads:
            if read.content is not None:
                yield from _numbers(read.content.items)


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
    return _Content(items=tuple(_object_reads(value, members_mentioned(type(value), names), depth)))


def _object_reads(value: object, names: frozenset[str], depth: int) -> Iterator[_Read]:
    space = vars(value)
    # transformers' configurations answer to other names than they store an attribute under.
    aliases = getattr(value, "attribute_map", {})
    for name in sorted({aliases.get(name, name) for name in names}):
        if name not in space:
            yield _Read(name, _Absent)
            continue
        try:
            yield _read(space, name, names, depth + 1)
        except _Unknown as unknown:
            raise _Unknown(f".{unknown.args[0]}") from None


def _copied(value: Any) -> Any:
    """Containers are copied as plain ones; what is in them must be constant."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in dict.items(value)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_copied, value))
    if isinstance(value, (*_CONSTANT, ModuleType)):
        return value
    raise _Unknown(f", which holds a {type(value).__name__}")


def _holds(space: Mapping[str, Any], read: _Read) -> bool:
    found, content = space.get(read.key, _Absent), read.content
    if content is None:
        return same_value(found, read.value)
    if content.copy is not None:
        return _equal(found, content.copy)
    return found is read.value and all(_holds(vars(found), inner) for inner in content.items)


def _equal(found: Any, copy: Any) -> bool:
    """Past the methods of container classes that derive from the plain ones."""
    plain: Any = type(copy)
    return isinstance(found, plain) and plain.__eq__(found, copy) is True


def _note(watch: Watch, space: Any, read: _Read) -> None:
    if watch.absent(space, read.key):
        return
    found = watch.item(space, read.key)
    if read.content is None:
        return
    if read.content.copy is not None and _equal(found, read.content.copy):
        watch.content(found, read.content.copy)
    elif hasattr(found, "__dict__"):
        for inner in read.content.items:
            _note(watch, vars(found), inner)


def _numbers(reads: Iterable[_Read]) -> Iterator[float]:
    for read in reads:
        if isinstance(read.value, float):
            yield read.value
        elif read.content is not None and not isinstance(read.value, ModuleType):
            yield from _numbers(read.content.items)
