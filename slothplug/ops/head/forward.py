"""The forward of a served head: lazy logits where the call has labels, and the original forward otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.kernels.linear_cross_entropy import LowRank
from slothplug.ops.head import adapter
from slothplug.ops.head.adapter import Parts
from slothplug.ops.head.head_call import HeadCall
from slothplug.ops.head.label_count import LabelCounts
from slothplug.ops.head.lazy_logits import put_off
from slothplug.ops.head.statistics_policy import StatisticsPolicy
from slothplug.ops.peft_lora.layer import Precision
from slothplug.patching.forward_context import current_forward
from slothplug.patching.predicates import OTHER_ARGUMENTS, plain, why_not_input
from slothplug.patching.private_class import is_patched
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now


@dataclass(frozen=True)
class HeadSpec:
    """What a served head needs beside its weights."""

    chunk_bytes: int
    precision: Precision = "peft"
    """Of an adapter on the head; as the setting ``lora_precision``."""
    policy: StatisticsPolicy = field(default_factory=StatisticsPolicy)


def fast_head(module: nn.Module, served: Served[HeadSpec, LabelCounts], /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the head's forward."""
    forward = current_forward(served.context)
    if forward is None or forward.labels is None:
        return served.fall_back(module, Refusal("called without labels"), *args, **kwargs)
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    hidden = args[0]
    if not is_patched(module) and not _stays_gathered(module):
        return served.fall_back(module, Refusal("its weights are freed when its call ends"), hidden)
    head_call = head_call_of(module, served, hidden)
    if isinstance(head_call, Refusal):
        return served.fall_back(module, head_call, hidden)
    forward.at_end.append(lambda: head_call.close(completed=not forward.failed))
    return put_off(head_call)


def head_call_of(module: nn.Module, served: Served[HeadSpec, LabelCounts], hidden: torch.Tensor) -> HeadCall | Refusal:
    """What the head multiplies in this call, or why its original forward is to answer it."""
    found = _parts_of(module)
    if isinstance(found, Refusal):
        return found
    weight, bias, lora = found
    if weight is None:
        return Refusal("it has no weight of its own")
    refusal = _why_not(module, hidden, weight, bias, served.device_type)
    if refusal is None and lora is not None:
        refusal = adapter.why_not_adapter(lora, weight, hidden)
    if refusal is not None:
        return refusal
    low_rank: LowRank | None = None
    if lora is not None:
        # Nothing refuses from here on: dropout draws its mask once.
        low_rank = adapter.low_rank_of(lora, hidden, served.spec.precision)
    dtype, spec = _product_dtype(hidden), served.spec
    return HeadCall(
        hidden, weight, bias, dtype, served.kernel, spec.chunk_bytes, served.calls, spec.policy, low_rank,
        partial(adapter.merged, module) if adapter.is_lora(module) else tuple,
    )  # fmt: skip


def _parts_of(module: nn.Module) -> Parts | Refusal:
    if adapter.is_lora(module):
        return adapter.parts_of(module)
    return Parts(module._parameters.get("weight"), module._parameters.get("bias"))


def _why_not(
    module: nn.Module, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device_type: str
) -> Refusal | None:
    if reason := why_not_now():
        return reason
    if module._backward_hooks or module._backward_pre_hooks:
        return Refusal("it has backward hooks")
    if reason := why_not_input(hidden, device_type):
        return reason
    if not _usable(weight, hidden) or not (bias is None or _usable(bias, hidden)):
        return Refusal("weight is sharded, elsewhere or of another dtype")
    return None


def _stays_gathered(module: nn.Module) -> bool:
    """Whether FSDP2, which put a class of its own above ours, leaves the weights whole until the backward."""
    get_state = getattr(module, "_get_fsdp_state", None)
    group = getattr(get_state(), "_fsdp_param_group", None) if get_state is not None else None
    return group is not None and getattr(group, "post_forward_mesh_info", group) is None


def _usable(parameter: torch.Tensor, hidden: torch.Tensor) -> bool:
    if not plain(parameter) or parameter.device != hidden.device or hasattr(parameter, "ds_id"):
        return False
    if parameter.numel() == 0:
        return False
    return parameter.dtype is hidden.dtype or (
        _product_dtype(hidden) is not hidden.dtype and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of ``F.linear(hidden, ...)``: autocast's where it is on; it leaves float64 alone."""
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
