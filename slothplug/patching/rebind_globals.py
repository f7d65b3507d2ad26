"""Copies of functions in which one global has another value; nothing outside the copy changes.

A decorated forward is a chain: each wrapper holds the next function in a closure cell, and the innermost function reads
the globals of its module. ``rebuild`` copies the chain. The functions that read the name get a copy of their globals
with the replacement in it, and the wrappers get cells that hold the copies; other cells and the defaults are shared.
The globals are copied once: a rebuilt function does not see what is assigned in the module later. Callers compare the
originals (``settled.SettledItems.of_forward``).
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_MAX_DEPTH = 16
"""Longest chain of wrappers that is followed."""

GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that read a name from a function's module."""


def chain(function: Callable[..., Any]) -> list[FunctionType]:
    """The plain functions reached from ``function`` through closure cells, partials and bound methods, itself first."""
    found: dict[int, FunctionType] = {}
    _collect(function, found, _MAX_DEPTH)
    return list(found.values())


def global_names(function: FunctionType) -> frozenset[str]:
    """Names that a function, or a function written inside it, reads from its module."""
    return _global_names(function.__code__)


def rebuild(function: Callable[..., Any], name: str, replacement: object) -> Callable[..., Any] | None:
    """A copy of ``function`` in which the global ``name`` is ``replacement``; None where nothing in its chain reads it.

    ``function`` may be a plain function, a ``functools.partial`` or a bound method; other callables are not entered.
    """
    copied: Callable[..., Any] = _Copy(name, replacement).of(function)
    return None if copied is function else copied


def _collect(value: object, found: dict[int, FunctionType], depth: int) -> None:
    function = function_in(value)
    if function is None or id(function) in found or depth == 0:
        return
    found[id(function)] = function
    for cell in function.__closure__ or ():
        _collect(cell_contents(cell), found, depth - 1)


def function_in(value: object) -> FunctionType | None:
    """The plain function that ``value`` is, or that it binds or calls with fixed arguments; None for other values."""
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, functools.partial):
        return function_in(value.func)
    if isinstance(value, MethodType):
        return function_in(value.__func__)
    return None


def cell_contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the name is not bound yet
        return None


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    # co_names alone holds attributes too.
    names = {each.argval for each in dis.get_instructions(code) if each.opname in GLOBAL_READS}
    return frozenset(names).union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _reads(function: FunctionType, name: str) -> bool:
    return name in function.__globals__ and name in global_names(function)


class _Copy:
    """State of one ``rebuild``: the copies and cells made so far."""

    def __init__(self, name: str, replacement: object) -> None:
        self.name, self.replacement = name, replacement
        self.functions: dict[int, FunctionType] = {}
        self.cells: dict[int, CellType] = {}

    def of(self, value: Any) -> Any:
        """The copy of ``value`` if its chain reads the name, otherwise ``value`` itself."""
        function = function_in(value)
        if function is None or not self._leads(function):
            return value
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *value.args, **value.keywords)
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), value.__self__)
        return self._function(function)

    def _leads(self, function: FunctionType) -> bool:
        """Whether the function reads the name, itself or through its cells."""
        return any(_reads(link, self.name) for link in chain(function))

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self.functions:
            return self.functions[id(function)]
        namespace = function.__globals__
        if _reads(function, self.name):
            namespace = {**namespace, self.name: self.replacement}
        cells = tuple(self._cell(cell) for cell in function.__closure__) if function.__closure__ else None
        copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
        self.functions[id(function)] = copied
        copied.__kwdefaults__ = dict(function.__kwdefaults__) if function.__kwdefaults__ else None
        copied.__annotations__ = dict(function.__annotations__)
        copied.__qualname__, copied.__module__, copied.__doc__ = (
            function.__qualname__, function.__module__, function.__doc__,
        )  # fmt: skip
        for old, new in zip(function.__closure__ or (), cells or (), strict=True):
            if new is not old:
                new.cell_contents = self.of(old.cell_contents)
        copied.__dict__.update(function.__dict__)
        if "__wrapped__" in copied.__dict__:
            copied.__dict__["__wrapped__"] = self.of(copied.__dict__["__wrapped__"])
        return copied

    def _cell(self, cell: CellType) -> CellType:
        """A new, empty cell if its content is copied, otherwise the cell itself, so that its state stays shared."""
        function = function_in(cell_contents(cell))
        if function is None or not self._leads(function):
            return cell
        return self.cells.setdefault(id(cell), CellType())
