"""Sessions: the recordings made in one call of the model, and who uses them now.

The recordings of one session are made in one call of the model and its backward. What a forward saves for its backward
lies in memory of the pool that is held while the session is being made, so within a session nothing overlaps that is
alive at one time, in whatever order the backward runs. Sessions overlap each other: at most one call of the model, with
the backward that belongs to it, uses recordings at a time, and every other call runs eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch

from slothplug.graphs.facts import UnitFacts
from slothplug.patching.eligibility import Binding
from slothplug.patching.precision import float32_switches
from slothplug.patching.sites import Refusal

if TYPE_CHECKING:
    from slothplug.graphs.captured import Captured
    from slothplug.graphs.state import GraphServed, GraphState


class Use:
    """A replayed forward whose backward may still come. It ends with that backward, or when autograd drops the node."""

    __slots__ = ("__weakref__", "_ended", "_state")

    def __init__(self, state: GraphState) -> None:
        self._state, self._ended = state, False
        state.open_uses += 1

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._state.open_uses -= 1

    def is_open(self) -> bool:
        return not self._ended

    def __del__(self) -> None:
        self.end()


class Session:
    """The recordings made in one call of the model.

    Attributes:
        binding: the state of the model that they hold for. The model owns it, and refers to this.
        size: elements of the first tensor of the first unit's call.
        captured: by what a unit's call is recorded for.
        refused: why a unit could not be recorded, by the same.
        recording: True until the next call of the model begins.
        last: place of the unit that was replayed last in the call in progress. Temporary tensors of a forward may lie
            where a later one saves, so units are replayed in the order in which they were recorded.
    """

    def __init__(self, binding: Binding, size: int) -> None:
        self.binding, self.size = weakref.ref(binding), size
        self.captured: dict[Hashable, Captured] = {}
        self.refused: dict[Hashable, Refusal] = {}
        self.recording = True
        self.last = -1
        self._switches = process_switches()
        self._task = -1
        self._holds = False

    def facts_of(self, served: GraphServed) -> UnitFacts:
        """What holds for a unit in the state of the recordings."""
        binding = self.binding()
        assert binding is not None  # it holds, or this session would not have been chosen
        facts: UnitFacts = binding.facts[served]
        return facts

    def holds_in_backward(self) -> bool:
        """Whether the model is in the state of the recordings; asked once in each backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            binding = self.binding()
            same = self._switches == process_switches()
            self._task, self._holds = task, same and binding is not None and binding.holds()
        return self._holds

    def close(self) -> None:
        """Gives the memory of saved tensors back to the pool, for the next session."""
        self.recording = False
        for captured in self.captured.values():
            captured.release()


class Chosen(NamedTuple):
    """What serves one call of the model.

    Attributes:
        session: holds the recordings.
        length: of the sequences for which they were made; None if for the call's own layouts only.
    """

    session: Session
    length: int | None


def process_switches() -> tuple[bool | str | None, ...]:
    """What the process has set that chooses kernels."""
    cuda = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        *float32_switches(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
