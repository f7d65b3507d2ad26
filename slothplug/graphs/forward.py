"""A unit's call: replayed where it was recorded, recorded where its key has recurred, eager otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from slothplug.graphs.call import Call, take_call
from slothplug.graphs.captured import Captured, Purpose
from slothplug.graphs.facts import UnitFacts
from slothplug.graphs.sessions import Chosen, Session
from slothplug.graphs.signature import Layout
from slothplug.graphs.state import GraphServed
from slothplug.patching.forward_context import ForwardContext, current_forward, facts_of
from slothplug.patching.sites import Refusal

_OUTSIDE = Refusal("called outside of a call of the model, as checkpointing recomputes")
_DECIDES_ITSELF = Refusal("code of the user's own runs inside the model's call")
_LATER = Refusal("it was not called, or called otherwise, when the model's call was recorded")
_BUSY = Refusal("the backward of an earlier call of it is still to come")
_READS_ON = Refusal("what it computes depends on what follows a sequence, so only lengths that recur are recorded")


def fast_unit(module: nn.Module, served: GraphServed, /, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the unit's forward."""
    forward = current_forward(served.context)
    if forward is not None and forward.recorded:
        return served.original(module, *args, **kwargs)
    call = take_call(module, served, args, kwargs)
    if isinstance(call, Refusal):
        why = call
    else:
        with served.shared.lock:
            found = _recording(call, forward)
            if isinstance(found, Captured):
                return found(call.tensors)
        why = found
    served.shared.count(why)
    # In a backward no call is in progress that keeps other threads from recording, which changes parameters.
    with served.shared.lock if forward is None else nullcontext():
        return served.original(module, *args, **kwargs)


def _recording(call: Call, forward: ForwardContext | None) -> Captured | Refusal:
    """What is to be replayed for a call."""
    if forward is not None:
        current = session_of(call, forward)
        return current if isinstance(current, Refusal) else recorded(call, current, Purpose.CALL)
    latest = call.served.shared.session_in_backward() if torch.is_grad_enabled() else None
    return _OUTSIDE if latest is None else recorded(call, latest, Purpose.RECOMPUTE)


def session_of(call: Call, forward: ForwardContext) -> Chosen | Refusal:
    """What serves the model's call in progress."""
    facts = facts_of(call.served)
    if not isinstance(facts, UnitFacts):
        return facts or _DECIDES_ITSELF
    return call.served.shared.session_of(forward, call) or Refusal()


def recorded(call: Call, chosen: Chosen, purpose: Purpose) -> Captured | Refusal:
    """The unit's recordings for a call and a purpose, made now if this is the time for it."""
    session, lengths = chosen.session, call.served.shared.lengths
    layouts = lengths.layouts(call, chosen.length)
    key = call.structure, layouts, purpose
    captured = session.captured.get(key)
    if captured is None:
        # Later, the memory of what other units save is the pool's again: only a recompute finds none of it alive.
        if key in session.refused or (purpose is not Purpose.RECOMPUTE and not session.recording):
            return session.refused.get(key, _LATER)
        if not call.served.shared.is_alone():
            return Refusal()  # the call that came from another thread was counted
        made = _record(call, layouts, session, purpose)
        if isinstance(made, Refusal):
            session.refused[key] = made
            return made
        captured = session.captured[key] = made
    if not captured.is_free():
        return _BUSY
    if not captured.fits(call.tensors):
        lengths.fix(call)
        return _READS_ON
    return captured


def _record(call: Call, layouts: Sequence[Layout], session: Session, purpose: Purpose) -> Captured | Refusal:
    recorder = call.served.shared.recorder(call.tensors[0].device)
    generator = recorder.generator_state()
    try:
        return Captured(call, layouts, session, purpose)
    except Exception as error:
        recorder.set_generator_state(generator)
        return Refusal(f"cannot be recorded: {type(error).__name__}: {str(error).splitlines()[0]}")
