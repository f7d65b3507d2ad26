"""Sequences of varying lengths share recordings: a unit's call is replayed for a longer sequence than it has.

Which dimension of each tensor is the sequence is learnt from two calls that differ in it alone. The positions after the
end hold zeros, and get zeros as gradients. That is the unit's own answer exactly where no position reads a later one;
whether a recording does is tried before it is first used so (``Captured.fits``). A boolean mask of attention has two
such dimensions: no position before the end sees one after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from slothplug.graphs.call import Call
from slothplug.graphs.signature import Layout, dense

Dimensions = tuple[tuple[int, ...], ...]
"""Of each tensor the dimensions that are the sequence: none, one, or of a mask the last two."""


def bucket(length: int) -> int:
    """The length for which a sequence of ``length`` positions is recorded: at most an eighth longer from 512 on.

    Below, 64 positions more or less do not change a step's time: reading the weights takes it.
    """
    step = 64
    while step * 16 <= length:
        step *= 2
    return -(-length // step) * step


class Lengths:
    """What the units' calls have shown about sequences."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Layout, ...]] = {}
        self._dimensions: dict[Hashable, Dimensions] = {}
        self._fixed: set[Hashable] = set()

    def observe(self, structure: Hashable, layouts: tuple[Layout, ...], tensors: Sequence[torch.Tensor]) -> None:
        """Compares a call with an earlier one of the same structure."""
        if structure in self._dimensions or structure in self._fixed:
            return
        earlier = self._seen.setdefault(structure, layouts)
        if earlier == layouts:
            return
        dimensions = _dimensions(earlier, layouts, [tensor.dtype is torch.bool for tensor in tensors])
        if dimensions is None:
            self._seen[structure] = layouts
        else:
            self._dimensions[structure] = dimensions

    def fix(self, call: Call) -> None:
        """From now on calls of this structure are recorded for their own length only."""
        self._fixed.add(call.structure)
        self._dimensions.pop(call.structure, None)

    def length(self, call: Call) -> int | None:
        """The sequence's length in a call; None where that is not known, or the layouts cannot be longer."""
        dimensions = self._dimensions.get(call.structure)
        if dimensions is None or not all(stride == dense(shape) for shape, stride in call.layouts):
            return None
        shape, _ = call.layouts[0]
        return shape[dimensions[0][0]]

    def layouts(self, call: Call, length: int | None) -> tuple[Layout, ...]:
        """The layouts of the same call with a sequence of ``length``; its own where that cannot be."""
        if length is None or self.length(call) is None:
            return call.layouts
        shapes = [
            tuple(length if at in sequence else size for at, size in enumerate(shape))
            for (shape, _), sequence in zip(call.layouts, self._dimensions[call.structure], strict=True)
        ]
        return tuple((shape, dense(shape)) for shape in shapes)


def _dimensions(one: Sequence[Layout], other: Sequence[Layout], boolean: Sequence[bool]) -> Dimensions | None:
    """Where the tensors of two calls differ, if that is one dimension of each, or of a boolean one the last two, and in
    all of them the same lengths."""
    dimensions: list[tuple[int, ...]] = []
    lengths: set[tuple[int, int]] = set()
    for (shape, _), (other_shape, _), is_boolean in zip(one, other, boolean, strict=True):
        sizes = enumerate(zip(shape, other_shape, strict=True))
        differ = tuple(at for at, (size, other_size) in sizes if size != other_size)
        if len(differ) > 1 and not (is_boolean and differ == (len(shape) - 2, len(shape) - 1)):
            return None
        dimensions.append(differ)
        lengths.update((shape[at], other_shape[at]) for at in differ)
    return tuple(dimensions) if len(lengths) == 1 and len(dimensions[0]) == 1 else None
