"""The patch primitive: an instance gets a private subclass of its own class, and gets its class back on undo.

Why a subclass and not a new ``forward`` on the instance: from transformers 5.24 on, ``GradientCheckpointingLayer``
wraps ``cls.forward`` in ``__init_subclass__``, so a replaced ``forward`` silently drops checkpointing while a subclass
keeps it. The subclass has its base's name, so FSDP's wrapping by class name, ``repr``, ``isinstance`` and state_dict
keys stay. There is one private class for each (stock class, forward), however many instances it serves. Pickles hold
the stock class and nothing of ours; deep copies keep the patch and use their own weights.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slothplug.errors import UndoError
from slothplug.patching.sites import STATE

BASE = "_slothplug_base"
"""Name of the class attribute, in a private class's own ``__dict__``, that holds the stock class."""


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` has, or had before it was patched."""
    return type(module).__dict__.get(BASE, type(module))


def is_patched(module: nn.Module) -> bool:
    """Whether ``module`` carries one of our private classes right now."""
    return BASE in type(module).__dict__


def take(module: nn.Module, make: Callable[[type[nn.Module]], type[nn.Module]], state: Any) -> None:
    """Gives ``module`` the private class that ``make`` returns for its class, and ``state``."""
    module.__class__ = make(type(module))
    module.__dict__[STATE] = state


def check_undoable(modules: Iterable[nn.Module]) -> None:
    """Raises ``UndoError`` where another class was put above ours: its stock class cannot be restored without loss."""
    for module in modules:
        if not is_patched(module) and any(BASE in base.__dict__ for base in type(module).__mro__):
            raise UndoError(
                f"{type(module).__name__} ({type(module).__module__}) was put above a class of slothplug's after the "
                f"patch, as fully_shard and parametrizations do. Undo the patch before that, or rebuild the model."
            )


def give_back(module: nn.Module) -> None:
    """Makes ``module`` what it was; does nothing to a module that is not ours."""
    if is_patched(module):
        module.__class__ = stock_class(module)
        del module.__dict__[STATE]


@functools.cache
def with_forward(base: type[nn.Module], fast: Callable[..., Any]) -> type[nn.Module]:
    """The private subclass of ``base`` whose forward is ``fast(module, served, *args, **kwargs)``.

    ``torch.compile`` sees the stock forward and nothing else: it guards on all that a traced function reads, so one
    counter would have every call compile again.
    """

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return base.forward(self, *args, **kwargs)
        return fast(self, self.__dict__[STATE], *args, **kwargs)

    return private(base, {"forward": forward})


def private(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    namespace = {
        BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce_to_stock,
        **members,
    }
    ours = type(base.__name__, (base,), namespace)
    # Not as a method: a wrapper that forwards unknown attributes (LoraModel, ModulesToSaveWrapper) would find its inner
    # module's __deepcopy__, and be copied as that module alone.
    copy._deepcopy_dispatch[ours] = _deepcopy  # type: ignore[attr-defined]
    return ours


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
    return {key: value for key, value in part.items() if key != STATE} if isinstance(part, dict) else part


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    base = stock_class(self)
    if hasattr(base, "__deepcopy__"):
        duplicate = base.__deepcopy__(self, memo)
    else:
        duplicate = base.__new__(base)
        memo[id(self)] = duplicate
        copy.deepcopy(self.__dict__[STATE], memo)  # a whole model's owner first: its modules' states look for it
        duplicate.__dict__.update(copy.deepcopy(_without_ours(self.__dict__), memo))
    duplicate.__class__ = type(self)
    duplicate.__dict__[STATE] = copy.deepcopy(self.__dict__[STATE], memo)
    return duplicate
