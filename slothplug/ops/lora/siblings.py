"""Siblings: linear layers of one parent that read the same input, computed together by the one that is called first.

No parent's forward is rewritten. The first sibling that is called computes the outputs of all and keeps those of the
others; each of them, when its own turn comes, collects its output if it is called with the same tensor, unchanged, in
the same state, and computes by itself otherwise. So a wrong guess about which layers are siblings costs time, never
numbers.

Who belongs together is decided at patch time and does not change: a checkpointed forward and its recompute must save
the same tensors. Kept outputs hold the autograd graph, so at most one group's are kept on a thread, and none past the
end of the outermost call or of the backward pass that recomputes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.ops.lora.dtypes import Autocast
from slothplug.ops.peft_lora.layer import LoraParts
from slothplug.patching.forward_context import ForwardContext, current_forward
from slothplug.patching.model_context import ModelContext
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import Calls

# Roles, and the ways in which models spell them: "{}_proj" with "q" is q_proj.
_SPELLINGS = ("{}", "{}_proj", "{}_lin", "{}_linear", "{}_layer", "to_{}", "linear_{}", "fc_{}", "w{}", "w_{}", "W{}")
_ROLES = (("q", "k", "v"), ("query", "key", "value"), ("gate", "up"))

# Names that follow no spelling. Each set lists layers that read the same hidden states.
_SETS = (
    ("w1", "w3"),  # Llama's own code, Mixtral, InternLM
    ("wi_0", "wi_1"),  # T5 1.1
    ("fc_1", "fc_2"),  # GPT-style gated MLPs
    ("c_fc_0", "c_fc_1"),  # EXAONE
    ("q_a_proj", "kv_a_proj_with_mqa"),  # latent attention
    ("q_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),  # gated delta nets
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)

NAME_SETS: tuple[tuple[str, ...], ...] = (
    *(tuple(spelling.format(role) for role in roles) for roles in _ROLES for spelling in _SPELLINGS),
    *_SETS,
)

_CROSS_ATTENTION = ("cross", "encoder_attn", "encdec")
"""In names of modules whose keys and values read another sequence than their queries."""

ANOTHER_INPUT = "its siblings' call had another input, so it computed alone"
NOT_ASKED_FOR = "computed with its siblings and never asked for"


class Group:
    """The siblings of one parent. Holds them weakly: a group keeps no module alive."""

    __slots__ = ("__weakref__", "modules")

    def __init__(self, modules: Sequence[nn.Module | None]) -> None:
        self.modules = [None if module is None else weakref.ref(module) for module in modules]


class Member:
    """A module's place in its group. A deep copy of the modules gets a group of the copies."""

    __slots__ = ("group", "index")

    def __init__(self, group: Group, index: int) -> None:
        self.group, self.index = group, index

    def module(self) -> nn.Module | None:
        reference = self.group.modules[self.index]
        return None if reference is None else reference()

    def others(self) -> Iterable[tuple[int, nn.Module]]:
        for index, reference in enumerate(self.group.modules):
            module = reference() if reference is not None and index != self.index else None
            if module is not None:
                yield index, module

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        group = memo.get(id(self.group))
        if group is None:
            group = memo[id(self.group)] = Group([None] * len(self.group.modules))
        duplicate = memo.get(id(self.module()))
        if duplicate is not None:
            group.modules[self.index] = weakref.ref(duplicate)
        return Member(group, self.index)


def groups_in(modules: Mapping[str, nn.Module], model: nn.Module) -> dict[nn.Module, Member]:
    """The places of those of ``modules`` that have siblings among them.

    Args:
        modules: by qualified name in ``model``; all that could share a node.
    """
    by_parent: dict[str, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        by_parent.setdefault(parent, {})[child] = module
    members: dict[nn.Module, Member] = {}
    for parent, children in by_parent.items():
        if not _attends_across(parent, model):
            for names in NAME_SETS:
                found = [children[name] for name in names if name in children and children[name] not in members]
                if len(found) > 1:
                    group = Group(found)
                    members.update((module, Member(group, index)) for index, module in enumerate(found))
    return members


def _attends_across(parent: str, model: nn.Module) -> bool:
    names = [*parent.split(".")[-3:], stock_class(model.get_submodule(parent)).__name__]
    return any(word in name.lower() for name in names for word in _CROSS_ATTENTION)


class State(NamedTuple):
    """What must be equal when an output is computed and when it is collected.

    A call of the model, or a backward pass (which recomputes), bounds the time in which weights stay what they are. On
    another stream than the one that computes it, an output might be read before it is written.

    Attributes:
        span: the outermost call, or the number of the backward pass; -1 outside of both.
        stream: the current CUDA stream; None on other devices.
    """

    span: ForwardContext | int
    grad: bool
    inference: bool
    autocast: Autocast
    stream: int | None

    @classmethod
    def now(cls, context: ModelContext, device: torch.device, autocast: Autocast) -> State:
        return cls(
            current_forward(context) or torch._C._current_graph_task_id(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None,
        )


class Kept(NamedTuple):
    """An output that waits for its module, and what it was computed from beside the shared input.

    Attributes:
        versions: of the parts' tensors, if nothing bounds the time between two siblings' calls; else empty.
    """

    output: torch.Tensor
    parts: LoraParts
    versions: tuple[int | None, ...]
    calls: Calls

    @classmethod
    def of(cls, output: torch.Tensor, parts: LoraParts, state: State, calls: Calls) -> Kept:
        return cls(output, parts, _versions(parts, state), calls)

    def is_of(self, parts: LoraParts, state: State) -> bool:
        """True if the output is still what ``parts`` compute."""
        same = self.parts is parts or (
            self.parts.compute_dtype is parts.compute_dtype and all(map(_same, self.parts.operand, parts.operand))
        )
        return same and self.versions == _versions(parts, state)


def _versions(parts: LoraParts, state: State) -> tuple[int | None, ...]:
    if state.span != -1:
        return ()
    return tuple(None if t.is_inference() else t._version for t in parts.operand if isinstance(t, torch.Tensor))


def _same(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


class _Round(NamedTuple):
    """What one sibling computed for the others, and in which state."""

    group: Group
    x: weakref.ref[torch.Tensor]
    version: int
    state: State
    kept: dict[int, Kept]

    def drop(self) -> None:
        """Forgets the outputs that are still kept, and counts them as computed in vain."""
        while self.kept:
            _, kept = self.kept.popitem()
            kept.calls.fallbacks[NOT_ASKED_FOR] += 1


class _Local(threading.local):
    round: _Round | None = None
    clears_at_end_of: ForwardContext | None = None


_local = _Local()


def shareable(x: torch.Tensor) -> bool:
    """Whether a change of ``x`` between two siblings' calls would be seen."""
    return not x.is_inference()


def collect(member: Member, x: torch.Tensor, parts: LoraParts, state: State) -> Kept | bool:
    """The output kept for ``member``; False if it should compute with its siblings, True if it should alone."""
    current = _local.round
    if current is None or current.group is not member.group:
        return False
    kept = current.kept.pop(member.index, None)
    if kept is None or current.state != state:
        return False
    if current.x() is x and current.version == x._version and kept.is_of(parts, state):
        return kept
    kept.calls.fallbacks[ANOTHER_INPUT] += 1
    return True


def keep(member: Member, x: torch.Tensor, state: State, kept: dict[int, Kept]) -> None:
    """Keeps outputs for the siblings of ``member``, by index, until they are collected or another group computes.

    The end of the call, or of the backward pass that recomputes, drops what is left. Where a part of the model is
    called by itself neither comes, and outputs that nobody collects wait for the next group that computes.
    """
    clear()
    current = _local.round = _Round(member.group, weakref.ref(x), x._version, state, kept)
    span = state.span
    if not isinstance(span, ForwardContext):
        if span != -1:
            # Backward may end on another thread than it recomputes on.
            torch.autograd.Variable._execution_engine.queue_callback(current.drop)
    elif span is not _local.clears_at_end_of:
        _local.clears_at_end_of = span
        span.at_end.append(_end)


def clear() -> None:
    """Drops what is kept on this thread, and counts it as computed in vain."""
    current, _local.round = _local.round, None
    if current is not None:
        current.drop()


def _end() -> None:
    _local.clears_at_end_of = None
    clear()
