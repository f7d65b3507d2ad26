"""Questions about modules and tensors, whatever the operation."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from slothplug.patching.sites import Refusal

OTHER_ARGUMENTS = Refusal("called with other arguments than its input")
"""For a call that passes more than the activations, or passes the activations by name."""


def device_of(module: nn.Module, model: nn.Module | None = None) -> torch.device:
    """The device of a module's first parameter or buffer; where it has none, of the ``model``'s; ``cpu`` at last."""
    for owner in (module, model):
        for tensor in () if owner is None else (*owner.parameters(), *owner.buffers()):
            return tensor.device
    return torch.device("cpu")


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first parameter that is no integer; float32 where it has none."""
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            return parameter.dtype
    return torch.float32


def plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """True for an ordinary dense tensor: no DTensor, quantised or lazy subclass."""
    return type(tensor) is torch.Tensor or type(tensor) is nn.Parameter


def why_not_input(x: object, device_type: str) -> Refusal | None:
    """Why no kernel for ``device_type`` may be called with the activations ``x``, whatever the operation."""
    if not plain(x):
        return Refusal(f"input of type {type(x).__name__}")
    if not x.is_floating_point():
        return Refusal(f"input of {x.dtype}")
    if x.device.type != device_type:
        return Refusal(f"input on {x.device.type}, patched for {device_type}")
    return None


def why_not_touchable(module: nn.Module, known: tuple[type, ...] = ()) -> Refusal | None:
    """Why a module's forward cannot be taken over, whatever it computes; None where it can.

    ``known`` are types of weights that the caller can read, beside plain tensors.
    """
    if "_hf_hook" in module.__dict__:
        return _why_not_dispatched(module.__dict__["_hf_hook"])
    if "forward" in module.__dict__:
        return Refusal("its forward was replaced on the instance by somebody else")
    if hasattr(module, "parametrizations"):
        return Refusal("its weights are parametrized")
    for tensor in module.parameters(recurse=False):
        if tensor.is_meta:
            return Refusal("its weights are on the meta device")
        if hasattr(tensor, "ds_id"):
            return Refusal("its weights are partitioned by ZeRO-3")
        if not plain(tensor) and type(tensor) not in known:
            return Refusal(f"its weights are of type {type(tensor).__name__}")
    return None


def _why_not_dispatched(hook: Any) -> Refusal:
    """Why a module is left that accelerate dispatched: its hook holds the stock forward and calls that."""
    parts = getattr(hook, "hooks", (hook,))  # accelerate's SequentialHook is made of several
    if any(getattr(part, "offload", False) for part in parts):
        return Refusal(
            "accelerate loads its weights for each call (device_map with offload); load the model without device_map, "
            "or with a device_map that names one GPU for all of it"
        )
    return Refusal(
        f"accelerate's {type(hook).__name__} calls its stock forward (device_map over several devices); load the model "
        f"without device_map, or with a device_map that names one device for all of it"
    )
