"""One call of a unit: what is recorded for, and what is replayed with."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slothplug.graphs.signature import Layout, skeleton, take_apart
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now

if TYPE_CHECKING:
    from slothplug.graphs.state import GraphServed

_HOOKS = Refusal("tensors saved for the backward are somebody else's to keep (checkpointing, offload)")
_INFERENCE = Refusal("inference mode")
_NO_TENSOR = Refusal("no tensor among its arguments")
_LARGE = Refusal("so many tokens that the device, not Python, takes the time")

# Llama-3-8B's shape on an H200, LoRA, bfloat16: a step of 512 tokens takes 40 ms instead of 152, one of 2048 tokens 129
# instead of 144 and 0.35 GiB more. Beyond, the device is never idle.
_MOST_TOKENS = 2048


class Call(NamedTuple):
    """One call of a unit.

    Attributes:
        structure: what the kernels that it launches depend on, beside the unit's facts and the tensors' layouts.
        layouts: of the tensors in its arguments, in the order of ``take_apart``.
        tensors: in the same order.
        autocast_to: the dtype of autocast; None where it is off.
    """

    module: nn.Module
    served: GraphServed
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structure: Hashable
    layouts: tuple[Layout, ...]
    tensors: list[torch.Tensor]
    autocast_to: torch.dtype | None

    def without_tensors(self) -> Call:
        """This call with another tensor in place of each in its arguments, which is not kept."""
        args, kwargs = skeleton(self.args), {name: skeleton(value) for name, value in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs, tensors=[])

    def autocast(self) -> torch.autocast:
        """Autocast as it was at the call."""
        on = self.autocast_to is not None
        return torch.autocast(self.served.device_type, dtype=self.autocast_to, enabled=on)


def take_call(module: nn.Module, served: GraphServed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | Refusal:
    """The call, where calls like this may be recorded."""
    if refusal := why_not_now() or _why_not_here():
        return refusal
    signature = take_apart(args, kwargs)
    if isinstance(signature, Refusal):
        return signature
    if not signature.tensors:
        return _NO_TENSOR
    x = signature.tensors[0]
    if x.numel() > _MOST_TOKENS * x.shape[-1]:
        served.shared.leave_room_for(x)
        return _LARGE
    autocast_to = _autocast_dtype(served.device_type)
    structure = served.name, signature.structure, torch.is_grad_enabled(), autocast_to
    call = Call(module, served, args, kwargs, structure, signature.layouts, signature.tensors, autocast_to)
    served.shared.lengths.observe(structure, signature.layouts, signature.tensors)
    return call


def _why_not_here() -> Refusal | None:
    if torch.is_inference_mode_enabled():
        return _INFERENCE
    saved = torch._C._autograd
    if torch.is_grad_enabled() and saved._top_saved_tensors_default_hooks(False) is not None:
        return _HOOKS
    return None


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
