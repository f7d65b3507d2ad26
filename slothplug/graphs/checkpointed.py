"""A unit under plain checkpointing: the node keeps the unit's arguments, and its backward replays forward and backward.

transformers' layers hand their call to ``_gradient_checkpointing_func``. Where that is torch's own checkpoint, not
reentrant, this module's node takes its place for a unit that is recorded. Every other function is called as it is:
what torch's reentrant checkpoint computes in the backward is replayed there (``forward``), the rest runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slothplug.graphs.call import Call, take_call
from slothplug.graphs.captured import Captured, Purpose
from slothplug.graphs.facts import Trained
from slothplug.graphs.forward import recorded, session_of
from slothplug.graphs.recorder import Recorder
from slothplug.graphs.sessions import Chosen
from slothplug.graphs.signature import mapped, put_together
from slothplug.graphs.state import GraphServed
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.patching.forward_context import current_forward
from slothplug.patching.served import STATE
from slothplug.patching.sites import Refusal

NAME = "_gradient_checkpointing_func"

_SAME_RESULT = {"use_reentrant", "preserve_rng_state", "determinism_check", "early_stop"}
"""Arguments of torch's checkpoint that do not change what it returns and which gradients come out."""


class CheckpointingFunction:
    """The class attribute ``_gradient_checkpointing_func`` of a recorded unit's private class.

    The function that transformers sets lies where it would lie without us, in the instance's ``__dict__``.
    """

    def __get__(self, unit: nn.Module | None, owner: type[nn.Module]) -> Any:
        if unit is None:
            return self
        if NAME not in unit.__dict__:
            raise AttributeError(NAME)
        given = unit.__dict__[NAME]
        served = unit.__dict__.get(STATE)
        if served is None or torch.compiler.is_compiling() or not _is_plain(given):
            return given
        return partial(_checkpointed, unit, served, given)

    def __set__(self, unit: nn.Module, value: Any) -> None:
        unit.__dict__[NAME] = value

    def __delete__(self, unit: nn.Module) -> None:
        del unit.__dict__[NAME]


def _is_plain(function: Any) -> bool:
    """Whether a function is torch's checkpoint, not reentrant, with nothing that changes what is kept."""
    if not isinstance(function, partial) or function.func is not checkpoint or function.args:
        return False
    return function.keywords.get("use_reentrant") is False and function.keywords.keys() <= _SAME_RESULT


def _checkpointed(
    unit: nn.Module, served: GraphServed, given: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    """What ``given(function, *args)`` returns, where ``function`` is the unit's call with keyword arguments."""
    with served.shared.lock:
        found = _first_pass(unit, served, function, args)
        if not isinstance(found, Refusal):
            captured, call, chosen = found
            trained = chosen.session.facts_of(served).trained
            outputs = _Checkpointed.apply(captured, call, chosen, *call.tensors, *(each.now() for each in trained))
            return captured.returned(outputs)
    served.shared.count(found)
    return given(function, *args)


def _first_pass(
    unit: nn.Module, served: GraphServed, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Captured, Call, Chosen] | Refusal:
    forward = current_forward(served.context)
    if forward is None or not torch.is_grad_enabled() or not _calls(function, unit) or _has_hooks(unit):
        return Refusal()
    call = take_call(unit, served, args, function.keywords)  # type: ignore[attr-defined]
    if isinstance(call, Refusal):
        return call
    chosen = session_of(call, forward)
    if isinstance(chosen, Refusal):
        return chosen
    captured = recorded(call, chosen, Purpose.FIRST_PASS)
    return captured if isinstance(captured, Refusal) else (captured, call, chosen)


def _calls(function: Any, unit: nn.Module) -> bool:
    """Whether ``function`` is what transformers' layer makes of its own call: of its bound method, or from 5.24 on of
    its class's forward."""
    if not isinstance(function, partial):
        return False
    return function.args == (unit,) or (not function.args and getattr(function.func, "__self__", None) is unit)


def _has_hooks(unit: nn.Module) -> bool:
    return any((unit._forward_hooks, unit._forward_pre_hooks, unit._backward_hooks, unit._backward_pre_hooks))


class _Checkpointed(torch.autograd.Function):
    """Inputs: the recording of the first pass, the call, its session, the tensors in its arguments, the trained
    parameters."""

    @staticmethod
    def forward(
        ctx: Any, captured: Captured, call: Call, chosen: Chosen, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tensors = inputs[: len(call.tensors)]
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.chosen = call.without_tensors(), chosen
        ctx.trained = chosen.session.facts_of(call.served).trained
        ctx.recorder = call.served.shared.recorder(tensors[0].device)
        ctx.generator = ctx.recorder.generator_state() if captured.draws else None
        outputs = captured.replay(tensors)
        ctx.kept = captured.differentiable(range(len(outputs)))
        ctx.mark_non_differentiable(*(y for i, y in enumerate(outputs) if i not in ctx.kept))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call._replace(tensors=list(ctx.saved_tensors))
        kept = [grad_outputs[i] for i in ctx.kept]
        with call.served.shared.lock, _generator_at(ctx.recorder, ctx.generator):
            recording = _recompute(call, ctx.chosen)
            if isinstance(recording, Captured):
                with call.autocast():
                    recording.replay_for_backward(call.tensors)
                grads = recording.backward(kept, [t.shape for t in call.tensors if t.requires_grad])
            else:
                call.served.shared.count(recording)
                grads = _eagerly(call, ctx.trained, kept)
        remaining = iter(grads)
        of_inputs = [next(remaining) if tensor.requires_grad else None for tensor in call.tensors]
        return (None, None, None, *of_inputs, *remaining)


_CHANGED = Refusal("the model was changed or called between a checkpointed call and its backward")


def _recompute(call: Call, chosen: Chosen) -> Captured | Refusal:
    if not call.served.shared.may_recompute(chosen.session):
        return _CHANGED
    with torch.enable_grad(), call.autocast():
        return recorded(call, chosen, Purpose.RECOMPUTE)


def _eagerly(call: Call, trained: Sequence[Trained], grad_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of the tensors in the arguments that need one and of the trained parameters."""
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors]
    args, kwargs = put_together(call.args, call.kwargs, inputs)
    outputs: list[torch.Tensor] = []
    with torch.enable_grad(), call.autocast():
        mapped(call.served.original(call.module, *args, **kwargs), outputs.append)
    leaves = [*(tensor for tensor in inputs if tensor.requires_grad), *(each.now() for each in trained)]
    differentiable = [y for y in outputs if y.requires_grad]
    return list(torch.autograd.grad(differentiable, leaves, grad_outputs, allow_unused=True))


@contextmanager
def _generator_at(recorder: Recorder, state: torch.Tensor | None) -> Iterator[None]:
    """The device's generator as it was at the first pass; ``None`` where no random number is drawn."""
    if state is None:
        yield
        return
    now = recorder.generator_state()
    recorder.set_generator_state(state)
    try:
        yield
    finally:
        recorder.set_generator_state(now)
