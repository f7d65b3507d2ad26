"""PEFT's dtype rules: in which dtypes the products of a LoRA layer's call are computed.

Under autocast every product is computed in autocast's dtype. Outside autocast the base layer multiplies in its input's
dtype (a 4-bit one in its ``compute_dtype``), and the adapter in its own, which its output leaves only for the sum.
PEFT's layer for 4-bit weights differs in one point: unless autocast is on for CUDA, on whatever device the layer is, it
casts the adapter's input and output.
"""

from __future__ import annotations

from typing import NamedTuple

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


def dtypes_of_call(x: torch.dtype, parts: LoraParts, autocast: Autocast, precision: Precision) -> Dtypes | Refusal:
    """The dtypes of a call's products for an input of dtype ``x``, or why they are not those of one node.

    Args:
        precision: "peft", or "compute": outside autocast the adapter multiplies in its input's dtype.
    """
    operand = parts.operand
    adapter, weight = operand.a.dtype, operand.weight.dtype
    packed = parts.compute_dtype is not None
    if not {x, adapter} <= _SERVED or operand.b.dtype is not adapter or not (packed or weight in _SERVED):
        return Refusal(f"input of {x}, base layer of {weight}, adapter of {adapter}")
    if autocast.dtype is not None and adapter not in (torch.float32, autocast.dtype, x):
        return Refusal(f"adapter of {adapter} under autocast in another dtype")
    low = autocast.dtype or (x if precision == "compute" else adapter)
    if parts.compute_dtype is not None:
        dequantized = operand.base.state.dtype  # type: ignore[attr-defined]
        if refusal := four_bit.why_not_dtypes(x, parts.compute_dtype, dequantized, autocast.dtype):
            return refusal
        output = torch.promote_types(x, autocast.dtype) if autocast.dtype and autocast.on_cuda else x
        return Dtypes(autocast.dtype or parts.compute_dtype, low, output)
    if autocast.dtype is not None:
        return Dtypes(autocast.dtype, autocast.dtype, autocast.dtype)
    if x is not weight:
        return Refusal(f"input of {x} outside autocast, base layer of {weight}")
    return Dtypes(x, low, x)


def dropout_input(x: torch.Tensor, parts: LoraParts, autocast: Autocast) -> torch.Tensor:
    """What PEFT's layer gives to its dropout."""
    adapter = parts.operand.a.dtype
    if x.dtype is adapter or (parts.compute_dtype is not None and autocast.on_cuda):
        return x
    return x.to(adapter)


_SERVED = frozenset(DTYPES)
