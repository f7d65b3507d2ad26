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


class _Source(NamedTuple):
    """A parameter, and the address, version and shape at which it was read."""

    parameter: weakref.ref[torch.Tensor]
    address: int
    version: int
    shape: torch.Size

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Source:
        return cls(weakref.ref(parameter), parameter.data_ptr(), _version(parameter), parameter.shape)

    def is_current(self, parameter: torch.Tensor) -> bool:
        return (
            self.parameter() is parameter
            and self.address == parameter.data_ptr()
            and self.version == _version(parameter)
            and self.shape == parameter.shape
        )


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


class _Copies(NamedTuple):
    """The factors of operands that are computed together, and what they were cast from."""

    factors: Factors
    sources: tuple[_Source, ...]

    def serves(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        return self.factors.a.dtype is dtype and all(map(_Source.is_current, self.sources, parameters))


class CastFactors(SharedState):
    """The cast factors of one patched model."""

    def __init__(self) -> None:
        self._call: weakref.ref[ForwardContext] | None = None
        self._dtype: torch.dtype | None = None
        self._copies: dict[Key, _Copies] = {}
        self._asked: dict[Key, tuple[weakref.ref[torch.Tensor], ...]] = {}

    def of(self, operands: Sequence[Operand], dtype: torch.dtype, call: ForwardContext | None) -> Factors:
        """The factors of ``operands`` in ``dtype``, without a graph.

        Args:
            operands: whose A's and B's are plain tensors of one other dtype.
            dtype: of the adapters' products.
            call: the outermost call in progress; None outside of one, which includes recomputation in backward.
        """
        parameters = [*(o.a for o in operands), *(o.b for o in operands)]
        if torch.is_inference_mode_enabled():
            # A recompute that is still to come could not save such a copy for its backward.
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
            copies = _Copies(_cast([parameters], dtype)[0], tuple(map(_Source.of, parameters)))
            self._copies[key] = copies
        self._asked[key] = tuple(source.parameter for source in copies.sources)
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
                self._copies[key] = _Copies(factors, tuple(map(_Source.of, parameters)))


def _castable(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return plain(parameter) and parameter.numel() > 0 and parameter.dtype is not dtype


def _cast(groups: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> list[Factors]:
    """Casts the parameters of each group, first the A's and then the B's: one allocation, one launch on a GPU."""
    sizes: list[int] = []
    sources: list[torch.Tensor] = []
    for parameters in groups:
        half = len(parameters) // 2
        sizes += [sum(a.numel() for a in parameters[:half]), *(b.numel() for b in parameters[half:])]
        sources += parameters
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    parts = iter(torch.empty(sum(padded), dtype=dtype, device=sources[0].device).split(padded))
    factors, targets = [], []
    for parameters in groups:
        half = len(parameters) // 2
        ranks, size_in = [a.shape[0] for a in parameters[:half]], parameters[0].shape[1]
        stacked = next(parts)[: sum(ranks) * size_in].view(sum(ranks), size_in)
        b = [next(parts)[: b.numel()].view(b.shape) for b in parameters[half:]]
        targets += [*stacked.split(ranks), *b]
        factors.append(Factors(stacked, b))
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
    return factors
