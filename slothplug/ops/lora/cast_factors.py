"""Adapter factors in autocast's dtype: cast by one multi-tensor launch a call of the model, not by one a layer.

Autocast keeps the adapters in float32 and multiplies in half precision, so every LoRA layer needs its A and B cast: 14
small launches for each decoder layer of a Llama, and as many again where checkpointing recomputes. Here the factors
that the last call asked for are cast together when the next one asks for the first of them, and serve that call and its
recompute.

No copy outlives the call after it was made: the next one casts again. A parameter's ``_version`` alone would not tell
whether a copy is current, since fused optimizers and writes through ``.data`` leave it as it was; it tells of writes
within a call, such as a hook's. Sharding engines give a parameter other memory while its layer runs; a copy belongs to
one address and one shape, so theirs are cast where they are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.predicates import plain


class _Copy(NamedTuple):
    """A parameter's values in another dtype, and the address and version at which they were read."""

    tensor: torch.Tensor
    parameter: weakref.ref[torch.Tensor]
    address: int
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor, tensor: torch.Tensor) -> _Copy:
        return cls(tensor, weakref.ref(parameter), parameter.data_ptr(), _version(parameter))

    def serves(self, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
        return (
            self.parameter() is parameter
            and self.address == parameter.data_ptr()
            and self.version == _version(parameter)
            and self.tensor.shape == parameter.shape
            and self.tensor.dtype is dtype
        )


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


class Casts(SharedState):
    """The copies of one patched model's adapter factors."""

    def __init__(self) -> None:
        self._call: weakref.ref[ForwardContext] | None = None
        self._dtype: torch.dtype | None = None
        self._copies: dict[int, _Copy] = {}
        self._asked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def weight(self, layer: nn.Module, dtype: torch.dtype, call: ForwardContext | None) -> torch.Tensor:
        """``layer.weight`` in ``dtype``, without a graph.

        Args:
            layer: an adapter's A or B, whose weight is a plain tensor of another dtype.
            dtype: the one that products are made in.
            call: the outermost call in progress; None outside of one, which includes recomputation in backward.
        """
        parameter: Any = layer._parameters["weight"]
        if torch.is_inference_mode_enabled():
            # A recompute that is still to come could not save such a copy for its backward.
            return parameter.detach().to(dtype)
        if call is None:
            if torch._C._current_graph_task_id() == -1:
                # Nothing bounds the time since the last call, or until the next recompute.
                self._copies.clear()
                return parameter.detach().to(dtype)
        elif self._call is None or self._call() is not call or self._dtype is not dtype:
            self._begin(call, dtype)
        copy = self._copies.get(id(parameter))
        if copy is None or not copy.serves(parameter, dtype):
            copy = self._copies[id(parameter)] = _Copy.of(parameter, parameter.detach().to(dtype))
        self._asked.add(layer)
        return copy.tensor

    def _begin(self, call: ForwardContext, dtype: torch.dtype) -> None:
        """Casts at once what the call before asked for."""
        self._call, self._dtype = weakref.ref(call), dtype
        asked, self._asked = self._asked, weakref.WeakSet()
        self._copies = {}
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in asked:
            parameter = layer._parameters.get("weight")
            if parameter is not None and plain(parameter) and parameter.numel() and parameter.dtype is not dtype:
                by_device.setdefault(parameter.device, []).append(parameter)
        for parameters in by_device.values():
            copies = _together(parameters, dtype)
            self._copies.update((id(p), _Copy.of(p, copy)) for p, copy in zip(parameters, copies, strict=True))


def _together(parameters: list[torch.Tensor], dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """Copies of ``parameters`` in ``dtype``: one allocation, one launch on a GPU."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
    copies = [part.view(p.shape) for part, p in zip(flat.split(sizes), parameters, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(copies, parameters)
    return copies
