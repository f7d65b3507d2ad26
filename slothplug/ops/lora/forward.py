"""The fast forward of a LoRA layer, alone or with the siblings that read the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.lora import Dtypes, Factors
from slothplug.ops.lora.cast_factors import CastFactors
from slothplug.ops.lora.dtypes import Autocast, dropout_input
from slothplug.ops.lora.facts import LoraFacts, LoraSpec, facts_now
from slothplug.ops.lora.siblings import Kept, Member, State, collect, keep, shareable
from slothplug.ops.peft_lora.four_bit import why_not_call
from slothplug.ops.peft_lora.layer import active_dropout
from slothplug.patching.forward_context import current_forward
from slothplug.patching.predicates import OTHER_ARGUMENTS, why_not_input
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now

LoraServed = Served[LoraSpec, CastFactors | None]


class _Ready(NamedTuple):
    """A layer that can be computed on an input."""

    facts: LoraFacts
    dtypes: Dtypes


def fast_lora(module: nn.Module, served: LoraServed, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the LoRA layer's forward."""
    if args or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, x, *args, **kwargs)
    if refusal := why_not_now() or why_not_input(x, served.device_type):
        return served.fall_back(module, refusal, x)
    autocast = Autocast.now(served.device_type)
    ready = _ready(module, served, x, autocast)
    if isinstance(ready, Refusal):
        return served.fall_back(module, ready, x)
    facts, dtypes = ready
    operand = facts.parts.operand
    dropout, member = active_dropout(facts.parts.dropout), served.spec.member
    # nn.DataParallel's replicas are no members of the group that their original is in.
    if dropout is None and member is not None and member.module() is module and shareable(x):
        state = State.now(served.context, x.device, autocast)
        kept = collect(member, x, operand, dtypes, state)
        if isinstance(kept, Kept):
            served.calls.collected += 1
            return served.calls.serve(kept.output)
        if not kept:
            return served.calls.serve(_with_siblings(member, served, x, ready, state))
    dropped = None
    if dropout is not None:
        # The mask is drawn as PEFT draws it: by the layer's own module, from an input in the adapter's dtype, in turn.
        dropped = dropout(dropout_input(x, facts.parts, autocast))
    factors = _factors(served, [ready])
    return served.calls.serve(served.kernel(x, (operand,), dtypes, adapter_input=dropped, factors=factors)[0])


def _ready(module: nn.Module, served: LoraServed, x: torch.Tensor, autocast: Autocast) -> _Ready | Refusal:
    """What the layer multiplies by, and in which dtypes, or why the original forward answers a call with ``x``."""
    facts = facts_now(module, served)
    if isinstance(facts, Refusal):
        return facts
    if x.device != facts.device:
        return Refusal(f"input on {x.device}, weights on {facts.device}")
    if x.shape[-1:] != (facts.size_in,):
        return Refusal("its weights are partitioned, or do not fit the input")
    if facts.parts.compute_dtype is not None and (refusal := why_not_call(module._modules["base_layer"], x)):
        return refusal
    dtypes = facts.dtypes_for(x.dtype, autocast, served.context.settings.lora_precision)
    return dtypes if isinstance(dtypes, Refusal) else _Ready(facts, dtypes)


def _factors(served: LoraServed, ready: Sequence[_Ready]) -> Factors | None:
    """A and B of each layer in the dtype of their products; None if they have it, or outside of a patch."""
    operands = [one.facts.parts.operand for one in ready]
    dtype = ready[0].dtypes.adapter
    if served.shared is None or operands[0].a.dtype is dtype:
        return None
    return served.shared.of(operands, dtype, current_forward(served.context))


def _with_siblings(member: Member, served: LoraServed, x: torch.Tensor, own: _Ready, state: State) -> torch.Tensor:
    """The member's output, computed with those of its siblings that are in the plain case."""
    together, partners = [own], []
    for index, sibling in member.others():
        sibling_served: LoraServed | None = sibling.__dict__.get(STATE)
        if sibling_served is None:
            continue
        ready = _ready(sibling, sibling_served, x, state.autocast)
        if isinstance(ready, Refusal) or active_dropout(ready.facts.parts.dropout) is not None:
            continue
        if ready.dtypes == own.dtypes and ready.facts.parts.operand.a.dtype is own.facts.parts.operand.a.dtype:
            together.append(ready)
            partners.append((index, sibling_served.calls))
    operands = [one.facts.parts.operand for one in together]
    output, *others = served.kernel(x, operands, own.dtypes, factors=_factors(served, together))
    kept = {
        index: Kept.of(y, operand, own.dtypes, state, calls)
        for (index, calls), y, operand in zip(partners, others, operands[1:], strict=True)
    }
    keep(member, x, state, kept)
    return output
