"""What a unit's call is made of: tensors, whose values may change between calls, and all the rest, which is the key.

Two calls of equal signatures launch the same kernels, as far as that depends on the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slothplug.patching.predicates import plain
from slothplug.patching.sites import Refusal

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


class Signature(NamedTuple):
    """A call's arguments, taken apart.

    Attributes:
        structure: with the constants; of each tensor the number of dimensions, dtype, device and ``requires_grad``.
        tensors: in the order of the structure.
        layouts: the tensors'.
    """

    structure: Hashable
    tensors: list[torch.Tensor]
    layouts: tuple[Layout, ...]


def take_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature | Refusal:
    """The signature of a call; a refusal where an argument is neither a plain tensor nor a constant."""
    tensors: list[torch.Tensor] = []
    key: list[Hashable] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        part = _part(value, tensors)
        if part is None:
            kind = type(value).__name__
            hint = "; use_cache=False avoids it" if "Cache" in kind else ""
            return Refusal(f"its argument {name!r} is or holds a {kind}, which cannot be recorded{hint}")
        key.append((name, part))
    return Signature(tuple(key), tensors, tuple(map(layout_of, tensors)))


def _part(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """What stands for ``value`` in a key, or None; its tensors are appended to ``tensors``."""
    if plain(value):
        tensors.append(value)
        return value.ndim, value.dtype, value.device, value.requires_grad
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if type(value) in (tuple, list):
        parts = tuple(_part(item, tensors) for item in value)
        return None if None in parts else (type(value), parts)
    if type(value) is dict:
        parts = tuple(_part(item, tensors) for item in value.values())
        return None if None in parts else (dict, tuple(value), parts)
    return None


def put_together(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Iterable[torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``tensors`` in place of their own, in the order of ``take_apart``."""
    remaining = iter(tensors)
    return (
        tuple(mapped(value, lambda _: next(remaining)) for value in args),
        {name: mapped(value, lambda _: next(remaining)) for name, value in kwargs.items()},
    )


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor; the stride of a dimension of size 1, which means nothing, is that of a dense tensor."""
    shape = tuple(tensor.shape)
    return shape, dense(shape) if tensor.is_contiguous() else tensor.stride()


def shortened(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of ``tensor`` of this shape that begins where it begins."""
    for at, size in enumerate(shape):
        if tensor.shape[at] != size:
            tensor = tensor.narrow(at, 0, size)
    return tensor


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one element along each dimension in which it is expanded: each element of memory once."""
    for at, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[at] > 1:
            tensor = tensor.narrow(at, 0, 1)
    return tensor


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_recordable(value: Any) -> bool:
    """Whether what a unit returns is made of tensors, constants, tuples, lists and dicts."""
    return _part(value, []) is not None


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in it replaced by what ``function`` makes of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(item, function) for item in value)
    if type(value) is dict:
        return {name: mapped(item, function) for name, item in value.items()}
    return value


PLACEHOLDER = torch.empty(0)
"""Stands for a tensor in a structure."""


def skeleton(value: Any) -> Any:
    """``value`` without the tensors in it: a placeholder is where each was."""
    return mapped(value, lambda _: PLACEHOLDER)
