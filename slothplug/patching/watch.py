"""Reading from a model what a decision depends on: without a trace for one call, or noted for the calls to come.

An operation has one function that reads a module. A call that decides for itself hands it ``UNWATCHED``; a ``Bind``
hands it a ``Watch``, which notes every item that is read, so that a ``Binding`` can compare all of them later. A
function may stop at the first thing that refuses: the refusal stands for as long as what was read until then does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module


class Reads:
    """Reads, and notes nothing."""

    def item(self, container: Mapping[Any, Any] | Sequence[Any], key: Any) -> Any:
        """``container[key]``, compared by identity."""
        return container[key]

    def absent(self, container: Mapping[Any, Any], key: Any) -> bool:
        """Whether ``key`` is not in ``container``; where it is, its item is noted."""
        return key not in container

    def get(self, container: Mapping[Any, Any], key: Any, default: Any = None) -> Any:
        """``container.get(key, default)``, compared by identity."""
        return container.get(key, default)

    def items(self, containers: Iterable[Mapping[Any, Any]], keys: Iterable[Any]) -> None:
        """Notes what each container has, or has not, under its key."""

    def content(self, container: dict[Any, Any] | list[Any] | tuple[Any, ...], copy: Any) -> None:
        """Notes ``container``, to be compared with ``copy``, which is of the plain type and equal to it now."""

    def empty(self, container: Sized) -> bool:
        """Whether ``container`` is empty; where it is not, its size is noted."""
        return len(container) == 0

    def size(self, container: Sized) -> int:
        """``len(container)``."""
        return len(container)

    def type_of(self, value: object) -> type:
        """The class of ``value``, compared by identity. A binding compares those of all modules in any case."""
        return type(value)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``: its address and dtype are compared, which ``.data = ...`` and ``.to()`` change."""
        return tensor

    def trained(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` requires grad."""
        return tensor.requires_grad

    def unhooked(self, module: nn.Module) -> bool:
        """Whether ``module``, which is part of the model, has no hooks and its own forward."""
        own = module.__dict__
        return not (
            torch_module._has_any_global_hook()
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        )


UNWATCHED = Reads()


class Watch(Reads):
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
        self._flagged: list[torch.Tensor] = []
        self._flags: list[bool] = []
        self._mutable: list[Any] = []
        self._copies: list[Any] = []
        self._noted: set[tuple[int, Any]] = set()

    def item(self, container: Mapping[Any, Any] | Sequence[Any], key: Any) -> Any:
        value: object = container[key]
        if self._is_new(container, key):
            self._containers.append(container)
            self._keys.append(key)
            self._values.append(value)
        return value

    def absent(self, container: Mapping[Any, Any], key: Any) -> bool:
        if key in container:
            self.item(container, key)
            return False
        if self._is_new(container, key):
            self._without.append(container)
            self._absent.append(key)
        return True

    def get(self, container: Mapping[Any, Any], key: Any, default: Any = None) -> Any:
        return default if self.absent(container, key) else container[key]

    def items(self, containers: Iterable[Mapping[Any, Any]], keys: Iterable[Any]) -> None:
        for container, key in zip(containers, keys, strict=False):  # ``containers`` may repeat one for ever
            self.absent(container, key)

    def content(self, container: dict[Any, Any] | list[Any] | tuple[Any, ...], copy: Any) -> None:
        if self._is_new(container, Watch.content):
            self._mutable.append(container)
            self._copies.append(copy)

    def empty(self, container: Sized) -> bool:
        if len(container) == 0:
            self._empty.append(container)
            return True
        self.size(container)
        return False

    def size(self, container: Sized) -> int:
        self._sized.append(container)
        self._sizes.append(len(container))
        return len(container)

    def type_of(self, value: object) -> type:
        self._objects.append(value)
        self._types.append(type(value))
        return type(value)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor, Watch.tensor):
            self._tensors.append(tensor)
        return tensor

    def trained(self, tensor: torch.Tensor) -> bool:
        self._flagged.append(tensor)
        self._flags.append(tensor.requires_grad)
        return tensor.requires_grad

    def unhooked(self, module: nn.Module) -> bool:
        # A binding is not used under global hooks, and notes every module's forward hooks.
        own = module.__dict__
        return (
            self.empty(own["_backward_hooks"])
            and self.empty(own["_backward_pre_hooks"])
            and self.absent(own, "forward")
            and super().unhooked(module)
        )

    def _is_new(self, container: object, key: object) -> bool:
        """False for what was noted before: modules share configurations, globals and classes."""
        noted = len(self._noted)
        self._noted.add((id(container), key))
        return len(self._noted) > noted
