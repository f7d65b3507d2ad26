"""The fast forward of a LoRA layer, alone or with the siblings that read the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slothplug.kernels.lora import DTYPES, Operand, Packed
from slothplug.ops.lora.cast_factors import Casts
from slothplug.ops.lora.siblings import Kept, Member, collect, keep, shareable, state_now
from slothplug.ops.peft_lora import four_bit
from slothplug.ops.peft_lora.layer import Adapted, adapted
from slothplug.patching.forward_context import current_forward
from slothplug.patching.predicates import OTHER_ARGUMENTS, why_not_input
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now

# On GPUs bitsandbytes multiplies few rows by a packed weight and unpacks it for more. Where it changes over depends on
# shape and GPU: 0.50's own table (backends/cuda/ops.py) says 64 rows for the larger weights on an H200.
_FEW_ROWS = 64


def fast_lora(
    module: nn.Module, served: Served[Member | None, Casts | None], x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Takes the place of the LoRA layer's forward."""
    if args or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, x, *args, **kwargs)
    if reason := why_not_now() or why_not_input(x, served.device_type):
        return served.fall_back(module, reason, x)
    found = adapted(module)
    if isinstance(found, Refusal):
        return served.fall_back(module, found, x)
    operand, dropout, _ = found
    member: Member | None = served.spec
    state: tuple[Any, ...] = ()
    alone = True
    # nn.DataParallel's replicas are no members of the group that their original is in.
    if member is not None and dropout is None and member.module() is module and shareable(x):
        state = state_now(served.context, x.device)
        kept = collect(member, x, _inputs(operand, state), state)
        if isinstance(kept, Kept):
            served.calls.collected += 1
            return served.calls.serve(kept.output)
        alone = kept
    if reason := _why_not(x, operand, module, served.device_type):
        return served.fall_back(module, reason, x)
    if dropout is not None:
        # The mask is drawn as PEFT draws it: by the layer's own module, from an input in the adapter's dtype, in turn.
        # PEFT's layer for 4-bit weights casts unless autocast is on for CUDA, whatever the device.
        as_it_is = x.dtype is operand.a.dtype or (
            isinstance(operand.weight, Packed) and torch.is_autocast_enabled("cuda")
        )
        dropped = dropout(x if as_it_is else x.to(operand.a.dtype))
        lowered = _lowered(served, (found,))
        return served.calls.serve(served.kernel(x, (operand,), adapter_input=dropped, lowered=lowered)[0])
    if alone or member is None:
        return served.calls.serve(served.kernel(x, (operand,), lowered=_lowered(served, (found,)))[0])
    return served.calls.serve(_for_siblings(member, served, x, found, state))


def _lowered(
    served: Served[Member | None, Casts | None], parts: Sequence[Adapted]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """A and B of each part in autocast's dtype; None where they are multiplied in their own, or outside of a patch."""
    if served.shared is None or not torch.is_autocast_enabled(served.device_type):
        return None
    dtype = torch.get_autocast_dtype(served.device_type)
    if parts[0].operand.a.dtype is dtype:
        return None
    casts = served.shared
    call = current_forward(served.context)
    return [(casts.weight(a, dtype, call), casts.weight(b, dtype, call)) for a, b in (p.factors for p in parts)]


def _for_siblings(
    member: Member, served: Served[Member | None, Casts | None], x: torch.Tensor, own: Adapted, state: tuple[Any, ...]
) -> torch.Tensor:
    """The member's output, computed with those of its siblings that are in the plain case."""
    parts, partners = [own], []
    for index, sibling in member.others():
        sibling_state = sibling.__dict__.get(STATE)
        if sibling_state is None:
            continue
        found = adapted(sibling)
        if isinstance(found, Refusal) or found.dropout is not None or not _share(found.operand, own.operand):
            continue
        if _why_not(x, found.operand, sibling, served.device_type) is None:
            parts.append(found)
            partners.append((index, sibling_state.calls))
    operands = [part.operand for part in parts]
    output, *others = served.kernel(x, operands, lowered=_lowered(served, parts))
    kept = {
        index: Kept(y, _inputs(o, state), calls)
        for (index, calls), y, o in zip(partners, others, operands[1:], strict=True)
    }
    keep(member, x, state, kept)
    return output


def _inputs(operand: Operand, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells whether a kept output is still that of ``operand``.

    Outside a call of the model and outside backward nothing bounds the time between two siblings' calls, so there the
    versions of the weights are compared as well.
    """
    weight = operand.weight.stored if isinstance(operand.weight, Packed) else operand.weight
    inputs = (weight, _packed_dtype(operand), *operand[1:])
    if state[0] != -1:
        return inputs
    return (*inputs, *(None if t.is_inference() else t._version for t in (weight, operand.a, operand.b)))


def _share(one: Operand, other: Operand) -> bool:
    """Whether one node can compute both."""
    return one.a.dtype is other.a.dtype and _packed_dtype(one) is _packed_dtype(other)


def _packed_dtype(operand: Operand) -> torch.dtype | None:
    return operand.weight.dtype if isinstance(operand.weight, Packed) else None


def _why_not(x: torch.Tensor, operand: Operand, module: nn.Module, device_type: str) -> Refusal | None:
    """Why these tensors go the original way."""
    a = operand.a
    if isinstance(operand.weight, Packed):
        if four_bit.repacks(module._modules["base_layer"], x):
            return Refusal("an evaluation without gradients, for which bitsandbytes repacks the weight on this CPU")
        return _why_not_packed(x, operand.weight, a, operand.b, device_type)
    weight = operand.weight
    if weight.device != x.device or a.device != x.device:
        return Refusal(f"input on {x.device}, weights on {weight.device} and {a.device}")
    if not weight.shape[-1] == a.shape[-1] == x.shape[-1]:
        return Refusal("its weights are partitioned, or do not fit the input")
    if x.dtype not in DTYPES or weight.dtype not in DTYPES or a.dtype not in DTYPES or operand.b.dtype is not a.dtype:
        return Refusal(f"input of {x.dtype}, base layer of {weight.dtype}, adapter of {a.dtype}")
    if not torch.is_autocast_enabled(device_type):
        if x.dtype is weight.dtype:
            return None
        return Refusal(f"input of {x.dtype} outside autocast, base layer of {weight.dtype}")
    return _why_not_autocast(x, a, device_type)


def _why_not_packed(
    x: torch.Tensor, weight: Packed, a: torch.Tensor, b: torch.Tensor, device_type: str
) -> Refusal | None:
    if weight.stored.device != x.device or a.device != x.device:
        return Refusal(f"input on {x.device}, weights on {weight.stored.device} and {a.device}")
    if not weight.state.shape[1] == a.shape[-1] == x.shape[-1]:
        return Refusal("its weights are partitioned, or do not fit the input")
    if x.dtype not in DTYPES or a.dtype not in DTYPES or b.dtype is not a.dtype:
        return Refusal(f"input of {x.dtype}, adapter of {a.dtype}")
    if x.device.type == "cuda" and not torch.is_grad_enabled() and x.numel() <= _FEW_ROWS * x.shape[-1]:
        return Refusal("few tokens without gradients, for which bitsandbytes has kernels that do not unpack the weight")
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if reason := four_bit.why_not_dtypes(x.dtype, weight, autocast):
        return reason
    return None if autocast is None else _why_not_autocast(x, a, device_type)


def _why_not_autocast(x: torch.Tensor, a: torch.Tensor, device_type: str) -> Refusal | None:
    if a.dtype is not torch.float32 and a.dtype is not torch.get_autocast_dtype(device_type) and a.dtype is not x.dtype:
        return Refusal(f"adapter of {a.dtype} under autocast in another dtype")
    return None
