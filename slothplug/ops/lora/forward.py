"""The fast forward of a LoRA layer, alone or with the siblings that read the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.lora import Dtypes, Factors, Operand
from slothplug.ops.lora.cast_factors import CastFactors
from slothplug.ops.lora.dtypes import Autocast, dropout_input, dtypes_of_call
from slothplug.ops.lora.facts import LoraFacts, LoraSpec, read_now, settle
from slothplug.ops.lora.siblings import Kept, Member, State, collect, keep, shareable
from slothplug.ops.peft_lora.four_bit import why_not_call
from slothplug.ops.peft_lora.layer import LoraParts, active_dropout
from slothplug.patching.forward_context import current_forward
from slothplug.patching.predicates import OTHER_ARGUMENTS, why_not_input
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now

LoraServed = Served[LoraSpec, CastFactors | None]


class _Ready(NamedTuple):
    """What a layer multiplies an input by, and in which dtypes."""

    operand: Operand
    dtypes: Dtypes


def fast_lora(module: nn.Module, served: LoraServed, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the LoRA layer's forward."""
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    x = args[0]
    if refusal := why_not_now() or why_not_input(x, served.device_type):
        return served.fall_back(module, refusal, x)
    found = read_now(module, served)
    if isinstance(found, Refusal):
        return served.fall_back(module, found, x)
    parts = found.parts if isinstance(found, LoraFacts) else found
    dropout, member = active_dropout(parts.dropout), served.spec.member
    autocast = Autocast.now(served.device_type)
    state = None
    # nn.DataParallel's replicas are no members of the group that their original is in.
    if dropout is None and member is not None and member.module() is module and shareable(x):
        state = State.now(served.context, x.device, autocast)
        kept = collect(member, x, parts, state)
        if isinstance(kept, Kept):
            served.calls.collected += 1
            return served.calls.serve(kept.output)
        if kept:
            state = None
    ready = _prepare(module, served, x, found, autocast)
    if isinstance(ready, Refusal):
        return served.fall_back(module, ready, x)
    if state is not None and member is not None:
        return served.calls.serve(_with_siblings(member, served, x, ready, state))
    dropped = None
    if dropout is not None:
        # The mask is drawn as PEFT draws it: by the layer's own module, from an input in the adapter's dtype, in turn.
        dropped = dropout(dropout_input(x, parts, autocast))
    factors = _factors(served, [ready])
    return served.calls.serve(
        served.kernel(x, (ready.operand,), ready.dtypes, adapter_input=dropped, factors=factors)[0]
    )


def _prepare(
    module: nn.Module, served: LoraServed, x: torch.Tensor, found: LoraFacts | LoraParts, autocast: Autocast
) -> _Ready | Refusal:
    """What the layer multiplies ``x`` by, or why the original forward answers."""
    facts = found if isinstance(found, LoraFacts) else settle(module, found)
    if isinstance(facts, Refusal):
        return facts
    if x.device != facts.device:
        return Refusal(f"input on {x.device}, weights on {facts.device}")
    if x.shape[-1] != facts.size_in:
        return Refusal("its weights are partitioned, or do not fit the input")
    if facts.dtypes.compute is not None and (refusal := why_not_call(module._modules["base_layer"], x)):
        return refusal
    dtypes = dtypes_of_call(x.dtype, facts.dtypes, autocast, served.context.settings.lora_precision)
    return dtypes if isinstance(dtypes, Refusal) else _Ready(facts.parts.operand, dtypes)


def _factors(served: LoraServed, ready: Sequence[_Ready]) -> Factors | None:
    """A and B of each layer in the dtype of their products; None if they have it, or outside of a patch."""
    operands = [one.operand for one in ready]
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
        found = read_now(sibling, sibling_served)
        if isinstance(found, Refusal):
            continue
        its_parts = found.parts if isinstance(found, LoraFacts) else found
        if active_dropout(its_parts.dropout) is not None:
            continue
        ready = _prepare(sibling, sibling_served, x, found, state.autocast)
        if isinstance(ready, Refusal):
            continue
        if ready.dtypes == own.dtypes and ready.operand.a.dtype is own.operand.a.dtype:
            together.append(ready)
            partners.append((index, its_parts, sibling_served.calls))
    operands = [one.operand for one in together]
    output, *others = served.kernel(x, operands, own.dtypes, factors=_factors(served, together))
    kept = {
        index: Kept.of(y, its_parts, state, calls)
        for (index, its_parts, calls), y in zip(partners, others, strict=True)
    }
    keep(member, x, state, kept)
    return output
