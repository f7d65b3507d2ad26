"""PEFT's dtype rules: in which dtypes the products of a LoRA layer's call are computed.

Under autocast every product is computed in autocast's dtype. Outside autocast the base layer multiplies in its input's
dtype (a 4-bit one in its ``compute_dtype``), and the adapter in its own, which its output leaves only for the sum.
PEFT's layer for 4-bit weights differs in one point: unless autocast is on for CUDA, on whatever device the layer is, it
casts the adapter's input and output.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from slothplug.kernels.lora import DTYPES, Dtypes
from slothplug.ops.peft_lora import four_bit
from slothplug.ops.peft_lora.layer import LoraParts, Precision
from slothplug.patching.sites import Refusal


class Autocast(NamedTuple):
    """Autocast's state.

    Attributes:
        dtype: on the input's device type; None if autocast is off there.
        on_cuda: whether it is on for CUDA.
    """

    dtype: torch.dtype | None
    on_cuda: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        enabled = torch.is_autocast_enabled(device_type)
        on_cuda = enabled if device_type == "cuda" else torch.is_autocast_enabled("cuda")
        return cls(torch.get_autocast_dtype(device_type) if enabled else None, on_cuda)


class LayerDtypes(NamedTuple):
    """Dtypes of a LoRA layer's tensors.

    Attributes:
        weight: the base layer's, as it is stored.
        compute: a 4-bit base layer's ``compute_dtype``; None for an ``nn.Linear``.
        dequantized: what a 4-bit weight is dequantised to; None for an ``nn.Linear``.
    """

    weight: torch.dtype
    a: torch.dtype
    b: torch.dtype
    compute: torch.dtype | None
    dequantized: torch.dtype | None

    @classmethod
    def of(cls, parts: LoraParts) -> LayerDtypes:
        operand, compute = parts.operand, parts.compute_dtype
        state: Any = None if compute is None else operand.base.state  # type: ignore[attr-defined]
        return cls(operand.weight.dtype, operand.a.dtype, operand.b.dtype, compute, state and state.dtype)


@functools.cache
def dtypes_of_call(x: torch.dtype, layer: LayerDtypes, autocast: Autocast, precision: Precision) -> Dtypes | Refusal:
    """The dtypes of a call's products for an input of dtype ``x``, or why one node does not compute in them.

    Args:
        precision: "peft", or "compute": outside autocast the adapter multiplies in its input's dtype.
    """
    adapter, packed = layer.a, layer.compute is not None
    if not {x, adapter} <= _SERVED or layer.b is not adapter or not (packed or layer.weight in _SERVED):
        return Refusal(f"input of {x}, base layer of {layer.weight}, adapter of {adapter}")
    if autocast.dtype is not None and adapter not in (torch.float32, autocast.dtype, x):
        return Refusal(f"adapter of {adapter} under autocast in another dtype")
    low = autocast.dtype or (x if precision == "compute" else adapter)
    if layer.compute is not None and layer.dequantized is not None:
        if refusal := four_bit.why_not_dtypes(x, layer.compute, layer.dequantized, autocast.dtype):
            return refusal
        output = torch.promote_types(x, autocast.dtype) if autocast.dtype and autocast.on_cuda else x
        return Dtypes(autocast.dtype or layer.compute, low, output)
    if autocast.dtype is not None:
        return Dtypes(autocast.dtype, autocast.dtype, autocast.dtype)
    if x is not layer.weight:
        return Refusal(f"input of {x} outside autocast, base layer of {layer.weight}")
    return Dtypes(x, low, x)


def dropout_input(x: torch.Tensor, parts: LoraParts, autocast: Autocast) -> torch.Tensor:
    """What PEFT's layer gives to its dropout."""
    adapter = parts.operand.a.dtype
    if x.dtype is adapter or (parts.compute_dtype is not None and autocast.on_cuda):
        return x
    return x.to(adapter)


_SERVED = frozenset(DTYPES)
