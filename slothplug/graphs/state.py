"""What the units of one patched model share: memory, the sessions in which they were recorded, and who uses them now.

The recordings of one session are made in one call of the model and its backward. What a forward saves for its backward
lies in memory of the pool that is held while the session is being made, so within a session nothing overlaps that is
alive at one time, in whatever order the backward runs. Sessions overlap each other: at most one call of the model, with
the backward that belongs to it, uses recordings at a time, and every other call runs eagerly.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from slothplug.graphs.mailbox import Mailbox
from slothplug.graphs.recorder import CudaRecorder, Recorder
from slothplug.patching.eligibility import Binding
from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.sites import Refusal
from slothplug.settings import Settings

if TYPE_CHECKING:
    from slothplug.graphs.captured import Captured

# Keys that are counted and not recorded yet: lengths vary in training.
_KEYS_COUNTED = 1024

make_recorder = CudaRecorder
"""Makes the recorder of a device; tests put another one here."""


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
        captured: by unit and key of the unit's call.
        refused: why a unit could not be recorded, by the same.
        recording: True until the next call of the model begins.
        last: place of the unit that was replayed last in the call in progress. Temporary tensors of a forward may lie
            where a later one saves, so units are replayed in the order in which they were recorded.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = weakref.ref(binding)
        self.captured: dict[Hashable, Captured] = {}
        self.refused: dict[Hashable, Refusal] = {}
        self.recording = True
        self.last = -1

    def close(self) -> None:
        """Gives the memory of saved tensors back to the pool, for the next session."""
        self.recording = False
        for captured in self.captured.values():
            captured.release()


class GraphState(SharedState):
    """Sessions and counters of one patched model.

    Attributes:
        open_uses: replayed forwards whose backward may still come; all are of one call of the model.
        replays: forwards replayed.
        reasons: calls of units that ran eagerly, by reason.
    """

    def __init__(self) -> None:
        self.settings = Settings()
        self.open_uses = 0
        self.replays = 0
        self.reasons: Counter[str] = Counter()
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()
        self._met: OrderedDict[Hashable, int] = OrderedDict()
        self._recorders: dict[torch.device, Recorder] = {}
        self._mailboxes: dict[torch.device, Mailbox] = {}

    def begin(self, forward: ForwardContext) -> None:
        if not self.open_uses:
            for session in self._sessions.values():
                session.last = -1
                if session.recording:
                    session.close()
            for mailbox in self._mailboxes.values():
                mailbox.forget()

    def session_of(self, forward: ForwardContext, key: Hashable) -> Session | None:
        """The session that serves a call of the model; a new one if ``key`` has recurred; None if units run eagerly.

        Args:
            key: of the first unit that is called.
        """
        if self not in forward.notes:
            forward.notes[self] = self._choose(forward, key)
        chosen: Session | None = forward.notes[self]
        return chosen

    def _choose(self, forward: ForwardContext, key: Hashable) -> Session | None:
        if self.open_uses:
            self.reasons["the backward of an earlier call is still to come"] += 1
            return None
        binding = forward.binding
        assert binding is not None
        session = self._sessions.get(key)
        if session is not None and session.binding() is not binding:
            del self._sessions[key]
            session = None
        if session is None:
            if not self._recurs(key):
                return None
            session = self._sessions[key] = Session(binding)
            if len(self._sessions) > self.settings.graph_shapes:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return session

    def _recurs(self, key: Hashable) -> bool:
        met = self._met[key] = self._met.pop(key, 0) + 1
        if len(self._met) > _KEYS_COUNTED:
            self._met.popitem(last=False)
        if met <= self.settings.graph_after:
            self.reasons["shapes that had not recurred yet"] += 1
            return False
        self._met[key] = 0  # recorded anew only after it has recurred again
        return True

    def recorder(self, device: torch.device) -> Recorder:
        if device not in self._recorders:
            self._recorders[device] = make_recorder(device)
        return self._recorders[device]

    def mailbox(self, device: torch.device) -> Mailbox:
        return self._mailboxes.setdefault(device, Mailbox())

    def lines(self) -> list[str]:
        """Sentences for the report."""
        shapes = len(self._sessions)
        units = max((len(session.captured) for session in self._sessions.values()), default=0)
        held = sum(recorder.held_bytes() for recorder in self._recorders.values()) / 2**30
        eager = [f"graphs: {count} calls of layers ran eagerly: {why}" for why, count in self.reasons.items()]
        summary = f"graphs: {units} layers recorded for {shapes} shapes, {held:.2f} GiB held, {self.replays} replays"
        return [summary, *eager]
