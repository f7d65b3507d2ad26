"""The patch primitive: an instance gets a private subclass of its own class, and gets its class back on undo.

A new ``forward`` on the instance would not do: from transformers 5.24 on, ``GradientCheckpointingLayer`` wraps
``cls.forward`` in ``__init_subclass__``, so a replaced ``forward`` silently drops checkpointing while a subclass keeps
it. The subclass has its base's name, so FSDP's wrapping by class name, ``repr``, ``isinstance`` and state_dict keys
stay. There is one private class for each (stock class, forward), however many instances it serves. Pickles hold the
stock class and nothing of ours; deep copies keep the patch and use their own weights.

Whoever takes the private class from an instance and uses it gets stock behaviour: calling it makes an instance of the
stock class, and an instance without our state (a subclass's, one made by ``__new__`` or by assigning ``__class__``)
runs the stock forward.

Attributes that a patch replaces on an instance are entered in a ledger on that instance, which undo and pickles read.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.errors import UndoError
from slothplug.patching.compiled import warn_of_compilation
from slothplug.patching.served import STATE
from slothplug.patching.sites import Refusal

BASE = "_slothplug_base"
"""Name of the class attribute, in a private class's own ``__dict__``, that holds the stock class."""

LEDGER = "_slothplug_ledger"
"""Key in a module's ``__dict__`` under which its replaced attributes lie."""

_ABSENT = object()


class _Replaced(NamedTuple):
    """An attribute's value before the patch, and the value that the patch gave it."""

    before: Any
    ours: Any


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` has, or had before it was patched."""
    return type(module).__dict__.get(BASE, type(module))


def is_patched(module: nn.Module) -> bool:
    """Whether ``module`` carries one of our private classes and our state."""
    return BASE in type(module).__dict__ and STATE in module.__dict__


def take(module: nn.Module, make: Callable[[type[nn.Module]], type[nn.Module]], state: Any) -> None:
    """Gives ``module`` the private class that ``make`` returns for its class, and ``state``."""
    module.__class__ = make(stock_class(module))
    module.__dict__[STATE] = state


def why_not_subclassed(module: nn.Module, make: Callable[[type[nn.Module]], type[nn.Module]]) -> Refusal | None:
    """Why ``make`` cannot make a private class of the module's: ``__init_subclass__`` and metaclasses may refuse."""
    try:
        make(stock_class(module))
    except Exception as error:
        return Refusal(f"its class cannot be subclassed: {type(error).__name__}: {error}")
    return None


def replace_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute of the instance and enters it in the ledger.

    Undo restores what was there before, unless somebody has set the attribute since; pickles hold what was there.
    """
    if BASE not in type(module).__dict__:
        module.__class__ = _without_members(type(module))  # type: ignore[arg-type]
    ledger: dict[str, _Replaced] = module.__dict__.setdefault(LEDGER, {})
    before = module.__dict__.get(name, _ABSENT)
    if name in ledger and before is ledger[name].ours:
        before = ledger[name].before
    ledger[name] = _Replaced(before, value)
    module.__dict__[name] = value


def check_undoable(modules: Iterable[nn.Module]) -> None:
    """Raises ``UndoError`` where another class was put above ours: its stock class cannot be restored without loss."""
    for module in modules:
        below = any(BASE in base.__dict__ for base in type(module).__mro__[1:])
        if below and BASE not in type(module).__dict__ and (STATE in module.__dict__ or LEDGER in module.__dict__):
            raise UndoError(
                f"{type(module).__name__} ({type(module).__module__}) was put above a class of slothplug's after the "
                f"patch, as fully_shard and parametrizations do. Undo the patch before that, or rebuild the model."
            )


def give_back(module: nn.Module) -> None:
    """Makes ``module`` what it was; does nothing to a module that is not ours."""
    if BASE in type(module).__dict__:
        _restore(module.__dict__)
        module.__class__ = stock_class(module)


def _restore(attributes: dict[str, Any]) -> None:
    """Takes everything of ours out of an instance's attributes."""
    attributes.pop(STATE, None)
    for name, replaced in attributes.pop(LEDGER, {}).items():
        if attributes.get(name, _ABSENT) is replaced.ours:
            del attributes[name]
            if replaced.before is not _ABSENT:
                attributes[name] = replaced.before


@functools.cache
def with_forward(
    base: type[nn.Module], fast: Callable[..., Any], members: tuple[tuple[str, Any], ...] = ()
) -> type[nn.Module]:
    """The private subclass of ``base`` whose forward is ``fast(module, served, *args, **kwargs)``, with ``members``.

    ``torch.compile`` sees the stock forward and nothing else: it guards on all that a traced function reads, so one
    counter would have every call compile again, and a word about one module would have each module compiled for itself.
    So ``warn`` has no arguments; it runs while a compiler traces, and leaves nothing in what is compiled.
    """

    def warn() -> None:
        warn_of_compilation(base)

    torch.compiler.assume_constant_result(warn)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        served = self.__dict__.get(STATE)
        if served is None or torch.compiler.is_compiling():
            if served is not None and torch.compiler.is_dynamo_compiling():
                warn()
            return base.forward(self, *args, **kwargs)
        return fast(self, served, *args, **kwargs)

    return private(base, {"forward": forward, **dict(members)})


@functools.cache
def _without_members(base: type[nn.Module]) -> type[nn.Module]:
    """The private subclass of ``base`` for instances of which only attributes are replaced."""
    return private(base, {})


def private(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """A private subclass of ``base`` with ``members``; the caller keeps it, one for each purpose."""
    namespace = {
        BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_to_stock,
        **members,
    }
    ours: type[nn.Module] = _metaclass(type(base))(base.__name__, (base,), namespace)  # type: ignore[arg-type]
    # Not as a method: a wrapper that forwards unknown attributes (LoraModel, ModulesToSaveWrapper) would find its inner
    # module's __deepcopy__, and be copied as that module alone.
    copy._deepcopy_dispatch[ours] = _deepcopy  # type: ignore[attr-defined]
    return ours


@functools.cache
def _metaclass(kind: type[type]) -> type[type]:
    """The metaclass of private classes whose base is of metaclass ``kind``: calling one makes a stock instance.

    ``__new__`` cannot do that: ``nn.DataParallel`` makes replicas with it, which are to be served.
    """

    def __call__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(cls.__dict__.get(BASE, cls), *args, **kwargs)

    def signature(cls: type) -> inspect.Signature:
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]

    namespace = {"__module__": kind.__module__, "__call__": __call__, "__signature__": property(signature)}
    return type(kind.__name__, (kind,), namespace)


def _reduce_to_stock(self: nn.Module, protocol: Any) -> Any:
    """What the stock class would be reduced to, with the state cleaned of ours."""
    ours = next(base for base in type(self).__mro__ if BASE in base.__dict__)
    base = ours.__dict__[BASE]
    make, arguments, *rest = base.__reduce_ex__(self, protocol)
    if type(self) is ours:  # a class that somebody put above ours is theirs to reduce
        arguments = tuple(base if argument is ours else argument for argument in arguments)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle insists that the class it calls with __newobj__ is the object's own.
            make, arguments = copyreg._reconstructor, (*arguments, object, None)  # type: ignore[attr-defined]
    # The state may be the live __dict__.
    return make, arguments, *(_without_ours(part) for part in rest)


def _without_ours(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    cleaned = dict(part)
    _restore(cleaned)
    return cleaned


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    base = stock_class(self)
    if hasattr(base, "__deepcopy__"):
        duplicate = base.__deepcopy__(self, memo)
    else:
        duplicate = base.__new__(base)
        memo[id(self)] = duplicate
        # A whole model's context first: its modules' states look for it.
        copy.deepcopy(self.__dict__.get(STATE), memo)
        duplicate.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != STATE}, memo))
    duplicate.__class__ = type(self)
    if STATE in self.__dict__:
        duplicate.__dict__[STATE] = copy.deepcopy(self.__dict__[STATE], memo)
    return duplicate
