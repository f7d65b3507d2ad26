"""Eligibility, decided once for each outermost call: one sweep over what the decisions were made from.

A served module whose operation has a ``Bind`` is asked once what its calls may take for granted: which adapter is
active, which tensors it multiplies by, that nobody put hooks on it. The operation reads every mutable thing that its
answer depends on through a ``Watch``. What the watches of a whole model saw is a ``Binding``. When the model is called,
the ``Guard`` compares all of it with what is there now, in a few passes that run in C, and the answers stand exactly
while nothing differs. A ``Binding`` is never changed: two calls that have the same one found the same state.

Nothing is bound in a recompute or where a part of the model is called by itself, since no outermost call is in progress
there, and nothing where foreign hooks may change the model inside the call. Modules decide for themselves then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Sized
from functools import partial
from operator import attrgetter, contains, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.patching.served import STATE, Served
from slothplug.patching.transforms import why_not_now

_INERT_HOOKS = "transformers."
"""Hooks from here do not change what a module is: ``enable_input_require_grads`` marks an output."""


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that nobody calls, so that hooks on them never run."""


class Watch:
    """Notes what is read from a model, so that ``Binding.holds`` can compare it later."""

    def __init__(self) -> None:
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[object] = []
        self._without: list[Mapping[Any, Any]] = []
        self._absent: list[Any] = []
        self._empty: list[Sized] = []
        self._sized: list[Sized] = []
        self._sizes: list[int] = []
        self._objects: list[object] = []
        self._types: list[type] = []
        self._tensors: list[torch.Tensor] = []
        self._mutable: list[Any] = []
        self._copies: list[Any] = []
        self._noted: set[tuple[int, Any]] = set()

    def item(self, container: Mapping[Any, Any] | Sequence[Any], key: Any) -> Any:
        """``container[key]``, compared by identity."""
        value: object = container[key]
        if self._is_new(container, key):
            self._containers.append(container)
            self._keys.append(key)
            self._values.append(value)
        return value

    def absent(self, container: Mapping[Any, Any], key: Any) -> bool:
        """Whether ``key`` is not in ``container``; noted where that is so."""
        if key in container:
            return False
        if self._is_new(container, key):
            self._without.append(container)
            self._absent.append(key)
        return True

    def content(self, container: dict[Any, Any] | list[Any] | tuple[Any, ...], copy: Any) -> None:
        """``container``, compared with ``copy``, which is of the plain type and equal to it now."""
        if self._is_new(container, Watch.content):
            self._mutable.append(container)
            self._copies.append(copy)

    def _is_new(self, container: object, key: object) -> bool:
        """False for what was noted before: modules share configurations, globals and classes."""
        noted = len(self._noted)
        self._noted.add((id(container), key))
        return len(self._noted) > noted

    def empty(self, container: Sized) -> bool:
        """Whether ``container`` is empty; noted where that is so."""
        if len(container):
            return False
        self._empty.append(container)
        return True

    def size(self, container: Sized) -> int:
        """``len(container)``."""
        self._sized.append(container)
        self._sizes.append(len(container))
        return len(container)

    def type_of(self, value: object) -> type:
        """The class of ``value``, compared by identity."""
        self._objects.append(value)
        self._types.append(type(value))
        return type(value)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``: its address and dtype are compared, which ``.data = ...`` and ``.to()`` change."""
        self._tensors.append(tensor)
        return tensor

    def unhooked(self, module: nn.Module) -> bool:
        """Whether ``module``, which is part of the model, has no hooks and its own forward; noted where that is so."""
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:  # these are noted for every module of the model
            return False
        return (
            self.empty(own["_backward_hooks"])
            and self.empty(own["_backward_pre_hooks"])
            and self.absent(own, "forward")
        )


class Binding:
    """The state of a model in which its modules' facts hold.

    Attributes:
        token: what ``Served.bound`` holds in the binding's place. A binding refers to the modules' own ``__dict__``,
            and a state that referred to the binding would close a cycle, which keeps a deleted model's memory.
    """

    def __init__(self, watch: Watch) -> None:
        self.token = object()
        self._watch = watch
        self._addresses = [tensor.data_ptr() for tensor in watch._tensors]
        self._dtypes = [tensor.dtype for tensor in watch._tensors]

    def holds(self) -> bool:
        """Whether everything is what it was when the facts were bound. Reads only; no device is asked."""
        seen = self._watch
        try:
            return (
                all(map(is_, map(getitem, seen._containers, seen._keys), seen._values))
                and not any(seen._empty)
                and list(map(len, seen._sized)) == seen._sizes
                and all(map(is_, map(type, seen._objects), seen._types))
                and not any(map(contains, seen._without, seen._absent))
                and all(map(_same_items, seen._mutable, seen._copies))
                and list(map(_address, seen._tensors)) == self._addresses
                and list(map(_dtype, seen._tensors)) == self._dtypes
            )
        except (KeyError, IndexError):  # something that was read is gone
            return False


def _same_items(container: Any, copy: Any) -> bool:
    # The plain type's comparison: a class derived from dict may compute its items.
    plain: Any = type(copy)
    return plain.__eq__(container, copy) is True


_address = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")


class Guard:
    """Gives each outermost call of one patched model the binding that holds for it.

    A state that one call has and the next has not (``with model.disable_adapter():``) costs no new binding: a model is
    bound anew when two calls in a row differ from what was bound.
    """

    __slots__ = ("_binding", "_differed", "_obstacle")

    def __init__(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: MutableMapping[int, Any]) -> Guard:
        duplicate = memo[id(self)] = Guard()
        return duplicate

    def forget(self) -> None:
        """Drops the binding, for a patch that serves more modules than before."""
        self._binding: Binding | None = None
        self._differed = False
        self._obstacle: Obstacle | None = None

    def check(self, root: nn.Module) -> Binding | None:
        """The binding for a call of ``root``; None where modules are to decide for themselves."""
        # Under a transform of torch.func the weights are wrappers without memory.
        if "_is_replica" in root.__dict__ or torch_module._has_any_global_hook() or why_not_now():
            return None
        if self._obstacle is not None and self._obstacle():
            return None
        if self._binding is not None:
            if self._binding.holds():
                self._differed = False
                return self._binding
            if not self._differed:
                self._differed = True
                return None
        self._differed = False
        found = _bind(root)
        self._binding, self._obstacle = (found, None) if isinstance(found, Binding) else (None, found)
        return self._binding


Obstacle = Callable[[], bool]
"""Whether that which kept a model from being bound still stands in the way."""


def _bind(root: nn.Module) -> Binding | Obstacle:
    """Asks every served module below ``root`` for its facts; an ``Obstacle`` where foreign hooks are there."""
    watch = Watch()
    facts: list[tuple[Served[Any, Any], Any]] = []
    for module in root.modules():
        own = module.__dict__
        called = type(module) not in _CONTAINERS
        for hooks in (own["_forward_pre_hooks"], own["_forward_hooks"]) if called else ():
            if watch.empty(hooks):
                continue
            if _has_foreign(hooks):
                return partial(_has_foreign, hooks)
            watch.size(hooks)
        for name, child in own["_modules"].items():
            served = None if child is None else child.__dict__.get(STATE)
            if isinstance(served, Served) and served.bind is not None:
                watch.item(own["_modules"], name)
                facts.append((served, served.bind(child, served, watch)))
    if not facts:
        return lambda: True
    binding = Binding(watch)
    for served, found in facts:
        served.bound = binding.token, found
    return binding


def _has_foreign(hooks: Mapping[int, Any]) -> bool:
    return not all((getattr(hook, "__module__", None) or "").startswith(_INERT_HOOKS) for hook in hooks.values())
