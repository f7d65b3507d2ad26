"""The Python code that a module's forward consists of: which names it mentions, and which globals it reads."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from slothplug.patching.rebind_globals import GLOBAL_READS, cell_contents, chain, function_in, global_names


class ForwardCode(NamedTuple):
    """What the code of a forward may read beside its arguments.

    Attributes:
        names: every attribute name and every string constant in the code, so that ``getattr(self, "scale", 1)`` counts
            as a mention of ``scale``. The code reads no attribute of any object under another name.
        namespaces: pairs of a namespace and a name in it that the code reads: globals, and variables that closures
            captured (these in a copy of their own).
    """

    names: frozenset[str]
    namespaces: tuple[tuple[Mapping[str, Any], str], ...]


def forward_code(owner: type[nn.Module], attributes: Mapping[str, Any]) -> ForwardCode:
    """The code of ``owner``'s forward: its closure chain, the methods and functions that it mentions, and theirs.

    ``attributes`` are those of an instance: functions among them count as methods. Functions of torch and of the
    standard library are not entered.
    """
    found = _Reached(owner, attributes)
    found.enter(owner.forward)
    return ForwardCode(frozenset(found.names), tuple(found.namespaces.values()))


def code_of(function: Callable[..., Any]) -> ForwardCode:
    """The same for a function that belongs to no module."""
    found = _Reached(object, {})
    found.enter(function)
    return ForwardCode(frozenset(found.names), tuple(found.namespaces.values()))


def members_mentioned(owner: type, names: frozenset[str]) -> frozenset[str]:
    """``names``, and those that the methods and properties of ``owner`` mention which are reached through them."""
    found = _Reached(owner, {})
    found.mention(names)
    return frozenset(found.names)


class _Reached:
    """The functions entered so far, and what they mention."""

    def __init__(self, owner: type, attributes: Mapping[str, Any]) -> None:
        self.owner, self.attributes = owner, attributes
        self.names: set[str] = set()
        self.namespaces: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.entered: set[FunctionType] = set()

    def enter(self, value: object) -> None:
        for function in chain(value):  # type: ignore[arg-type]
            if function in self.entered or _is_library(function):
                continue
            self.entered.add(function)
            captured = _captured(function)
            for name in captured:
                self.namespaces[id(captured), name] = captured, name
            for name in global_names(function) & function.__globals__.keys():
                self.namespaces[id(function.__globals__), name] = function.__globals__, name
                self.enter(function.__globals__[name])
            self.mention(mentioned(function.__code__))

    def mention(self, names: frozenset[str]) -> None:
        new = names - self.names
        self.names |= new
        for name in new:
            self.enter(self.attributes.get(name))
            for base in self.owner.__mro__:
                if base not in (nn.Module, object) and name in vars(base):
                    for function in _functions_of(vars(base)[name]):
                        self.enter(function)


@functools.cache
def mentioned(code: CodeType) -> frozenset[str]:
    """Attribute names and identifiers among the string constants, in functions written inside this one too."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opcode in dis.hasname and instruction.opname not in GLOBAL_READS
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= mentioned(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


def _functions_of(member: object) -> Iterator[object]:
    """The functions behind a class's member: a method of any kind, a property, a cached property."""
    if isinstance(member, (staticmethod, classmethod)):
        yield member.__func__
    elif isinstance(member, property):
        yield member.fget
    elif isinstance(member, functools.cached_property):
        yield member.func
    else:
        yield member


def _captured(function: FunctionType) -> dict[str, Any]:
    """The captured variables that hold no function; ``chain`` follows those that do."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    contents = {name: cell_contents(cell) for name, cell in cells}
    return {name: value for name, value in contents.items() if function_in(value) is None}


def _is_library(function: FunctionType) -> bool:
    package = (function.__globals__.get("__name__") or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
