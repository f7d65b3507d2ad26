"""Adapter factors in the dtype of their products: cast by one multi-tensor launch a call of the model.

Autocast keeps the adapters in float32 and multiplies in half precision, so every LoRA layer needs its A and B cast: 14
small launches for each decoder layer of a Llama, and as many again if checkpointing recomputes. Here the factors that
the last call asked for are cast together when the next call asks for the first of them, and serve that call and its
recompute. The A's of layers that are computed together lie one below the other: the stacked A is a view.

No copy outlives the call after it was made: the next one casts again. A parameter's ``_version`` alone would not tell
whether a copy is current, since fused optimizers and writes through ``.data`` leave it as it was; it tells of writes
within a call, such as a hook's. Sharding engines give a parameter other memory while its layer runs; a copy belongs to
one address and one shape, so theirs are cast where they are used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from slothplug.kernels.lora import Factors, Operand
from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.predicates import plain

# Copies begin at multiples of this many elements: matrix products prefer aligned operands.
_ALIGNMENT = 64

Key = tuple[int, ...]
"""Identities of the A's of operands that are computed together."""


class _Copies(NamedTuple):
    """The factors of operands that are computed together, and what they were cast from.

    Attributes:
        parameters: the A's, then the B's.
        read: address, version and shape at which each of them was read.
    """

    factors: Factors
    parameters: tuple[weakref.ref[torch.Tensor], ...]
    read: list[_Read]

    @classmethod
    def of(cls, factors: Factors, parameters: Sequence[torch.Tensor]) -> _Copies:
        return cls(factors, tuple(map(weakref.ref, parameters)), list(map(_read, parameters)))

    def serves(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        return (
            self.factors.a.dtype is dtype
            and all(reference() is parameter for reference, parameter in zip(self.parameters, parameters, strict=True))
            and self.read == list(map(_read, parameters))
        )


_Read = tuple[int, int, torch.Size]


def _read(parameter: torch.Tensor) -> _Read:
    version = 0 if parameter.is_inference() else parameter._version
    return parameter.data_ptr(), version, parameter.shape


class CastFactors(SharedState):
    """The cast factors of one patched model."""

    def __init__(self) -> None:
        self._call: weakref.ref[ForwardContext] | None = None
        self._dtype: torch.dtype | None = None
        self._copies: dict[Key, _Copies] = {}
        self._asked: dict[Key, tuple[weakref.ref[torch.Tensor], ...]] = {}

    def begin(self, forward: ForwardContext) -> None:
        # Where the layers' recordings are replayed, nobody asks for copies any more.
        self._copies = {}

    def of(self, operands: Sequence[Operand], dtype: torch.dtype, call: ForwardContext | None) -> Factors:
        """The factors of ``operands`` in ``dtype``, without a graph.

        Args:
            operands: whose A's and B's are plain tensors of one other dtype.
            dtype: of the adapters' products.
            call: the outermost call in progress; None outside of one, which includes recomputation in backward.
        """
        parameters = [*(o.a for o in operands), *(o.b for o in operands)]
        if torch.is_inference_mode_enabled() or (call is not None and call.recorded):
            # A recompute that is still to come could not save such a copy for its backward; a recording casts anew.
            return _cast([parameters], dtype)[0]
        if call is None:
            if torch._C._current_graph_task_id() == -1:
                # Nothing bounds the time since the last call, or until the next recompute.
                self._copies.clear()
                return _cast([parameters], dtype)[0]
        elif self._call is None or self._call() is not call or self._dtype is not dtype:
            self._begin(call, dtype)
        key = tuple(map(id, parameters[: len(operands)]))
        copies = self._copies.get(key)
        if copies is None or not copies.serves(parameters, dtype):
            copies = self._copies[key] = _Copies.of(_cast([parameters], dtype)[0], parameters)
        self._asked[key] = copies.parameters
        return copies.factors

    def _begin(self, call: ForwardContext, dtype: torch.dtype) -> None:
        """Casts together what the call before asked for."""
        self._call, self._dtype = weakref.ref(call), dtype
        asked, self._asked = self._asked, {}
        self._copies = {}
        by_device: dict[torch.device, dict[Key, list[torch.Tensor]]] = {}
        for key, references in asked.items():
            parameters = [p for p in (reference() for reference in references) if p is not None]
            if len(parameters) == len(references) and all(_castable(p, dtype) for p in parameters):
                by_device.setdefault(parameters[0].device, {})[key] = parameters
        for groups in by_device.values():
            for (key, parameters), factors in zip(groups.items(), _cast(list(groups.values()), dtype), strict=True):
                self._copies[key] = _Copies.of(factors, parameters)


def _castable(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return plain(parameter) and parameter.numel() > 0 and parameter.dtype is not dtype


def _cast(groups: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> list[Factors]:
    """Casts the parameters of each group, first the A's and then the B's: one allocation, one launch on a GPU."""
    layouts = [_layout(tuple(parameter.shape for parameter in parameters)) for parameters in groups]
    buffer = torch.empty(sum(layout.size for layout in layouts), dtype=dtype, device=groups[0][0].device)
    factors, targets, begin = [], [], 0
    for layout in layouts:
        a = [buffer.as_strided(shape, strides, begin + offset) for shape, strides, offset in layout.a]
        b = [buffer.as_strided(shape, strides, begin + offset) for shape, strides, offset in layout.b]
        targets += [*a, *b]
        shape, strides, offset = layout.stacked_a
        factors.append(Factors(a[0] if len(a) == 1 else buffer.as_strided(shape, strides, begin + offset), b))
        begin += layout.size
    with torch.no_grad():
        torch._foreach_copy_(targets, [parameter for parameters in groups for parameter in parameters])
    return factors


_Place = tuple[tuple[int, int], tuple[int, int], int]
"""Shape, strides and offset of a contiguous matrix in a buffer."""


class _Layout(NamedTuple):
    """Where the copies of one group lie, in elements from the beginning of the group's part of a buffer."""

    size: int
    stacked_a: _Place
    a: tuple[_Place, ...]
    b: tuple[_Place, ...]


@functools.lru_cache(maxsize=256)
def _layout(shapes: tuple[torch.Size, ...]) -> _Layout:
    """``shapes`` are those of the A's, [r_i, K], and then of the B's."""
    half = len(shapes) // 2
    a, b, end = [], [], 0
    for rank, size_in in shapes[:half]:
        a.append(_place(rank, size_in, end))
        end += rank * size_in
    stacked = _place(sum(rank for rank, _ in shapes[:half]), shapes[0][1], 0)
    for size_out, rank in shapes[half:]:
        end = _aligned(end)
        b.append(_place(size_out, rank, end))
        end += size_out * rank
    return _Layout(_aligned(end), stacked, tuple(a), tuple(b))


def _place(rows: int, columns: int, offset: int) -> _Place:
    return (rows, columns), (columns, 1), offset


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
