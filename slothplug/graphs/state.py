"""What the units of one patched model share: which session serves a call, memory, and what the report says."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import TypeAlias

import torch

from slothplug.graphs.call import Call
from slothplug.graphs.facts import UnitFacts
from slothplug.graphs.lengths import Lengths, bucket
from slothplug.graphs.mailbox import Mailbox
from slothplug.graphs.recorder import CudaRecorder, Recorder
from slothplug.graphs.sessions import Chosen, Session, process_switches
from slothplug.patching.eligibility import Binding
from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.served import Served
from slothplug.patching.sites import Refusal
from slothplug.settings import Settings

# Keys that are counted and not recorded yet: lengths vary in training.
_KEYS_COUNTED = 1024

_NEW = Refusal("shapes that had not recurred yet")
_THREADS = Refusal("several threads call the model")
_NO_ROOM = Refusal("not enough memory on the device for recordings beside the run")

make_recorder = CudaRecorder
"""Makes the recorder of a device; tests put another one here."""


class GraphState(SharedState):
    """Sessions and counters of one patched model.

    Attributes:
        takes_use_cache: whether the model's forward has a parameter ``use_cache``.
        lock: held while recordings are made or replayed, except in the backward of a replayed forward: until that has
            come, nobody else uses recordings.
        open_uses: replayed forwards whose backward may still come; all are of one call of the model.
        lengths: what the units' calls have shown about sequences.
        sessions: by the key of the first unit that was called; the one used least recently comes first.
        replays: forwards replayed.
        reasons: calls of units that ran eagerly, by reason.
    """

    def __init__(self) -> None:
        self.settings = Settings()
        self.takes_use_cache = False
        self.lock = threading.RLock()
        self.open_uses = 0
        self.replays = 0
        self.reasons: Counter[str] = Counter()
        self.sessions: OrderedDict[Hashable, Session] = OrderedDict()
        self._met: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        self._calls = 0
        self._threads: set[int] = set()
        self._largest = 0
        self.lengths = Lengths()
        self._latest: Chosen | None = None
        self._recorders: dict[torch.device, Recorder] = {}
        self._mailboxes: dict[torch.device, Mailbox] = {}

    def begin(self, forward: ForwardContext) -> None:
        if self._needs_no_cache(forward):
            # Layers that are given a cache cannot be recorded.
            forward.keywords["use_cache"] = False
        with self.lock:
            self._calls += 1
            forward.at_end.append(self._end)
            self._threads.add(threading.get_ident())
            if len(self._threads) > 1:
                self.count(_THREADS)
                forward.notes[self] = None
                return
            self._latest = None
            if not self.open_uses:
                self._close_sessions()

    def _needs_no_cache(self, forward: ForwardContext) -> bool:
        """Whether a call is a step that would build a cache that nobody reads, for the positions that are the default.

        Without a cache, transformers looks in positions that are passed for the ends of packed sequences.
        """
        labels, given = forward.labels, forward.keywords
        if not self.takes_use_cache or labels is None or not torch.is_grad_enabled():
            return False
        asked = ("use_cache", "past_key_values", "cache", "position_ids")
        return labels.numel() > 0 and all(given.get(name) is None for name in asked)

    def _end(self) -> None:
        with self.lock:
            self._calls -= 1

    def _close_sessions(self) -> None:
        for session in self.sessions.values():
            session.last = -1
            if session.recording:
                session.close()
        for mailbox in self._mailboxes.values():
            mailbox.forget()

    def is_alone(self) -> bool:
        """Whether one thread alone has called the model: recording a unit changes its parameters for a moment."""
        return len(self._threads) == 1

    def may_recompute(self, session: Session) -> bool:
        """Whether a session serves what is recomputed in a backward."""
        return not self.open_uses and not self._calls and session.holds_in_backward()

    def session_of(self, forward: ForwardContext, call: Call) -> Chosen | None:
        """What serves a call of the model whose first unit is called; None if its units run eagerly."""
        if self not in forward.notes:
            self._latest = forward.notes[self] = self._choose(forward, call)
        chosen: Chosen | None = forward.notes[self]
        return chosen

    def session_in_backward(self) -> Chosen | None:
        """What served the latest call of the model, for what is recomputed in its backward."""
        chosen = self._latest
        if chosen is None or torch._C._current_graph_task_id() == -1:
            return None
        return chosen if self.may_recompute(chosen.session) else None

    def _choose(self, forward: ForwardContext, call: Call) -> Chosen | None:
        if self.open_uses:
            self.reasons["the backward of an earlier call is still to come"] += 1
            return None
        binding, device = forward.binding, call.tensors[0].device
        assert binding is not None
        length = self.lengths.length(call)
        own = None if length is None or not self.settings.graph_padding else bucket(length)
        key = self._key(call, own)
        session, why_not = self._session(key, binding), None
        if session is None:
            self.leave_room_for(call.tensors[0])
            why_not = self._why_not_recorded(key, device, binding)
            if why_not is None:
                session = self._new_session(call, own, binding)
        if session is not None:
            self.sessions.move_to_end(key)
            self.recorder(device).follow()
            return Chosen(session, own)
        if own is not None and (longer := self._longer(call, own, binding)) is not None:
            self.recorder(device).follow()
            return longer
        assert why_not is not None
        self.count(why_not)
        self._measure(forward, key, device)
        return None

    def _key(self, call: Call, length: int | None) -> Hashable:
        return call.structure, self.lengths.layouts(call, length), process_switches()

    def _session(self, key: Hashable, binding: Binding) -> Session | None:
        session = self.sessions.get(key)
        if session is not None and session.binding() is not binding:
            del self.sessions[key]
            return None
        return session

    def _new_session(self, call: Call, length: int | None, binding: Binding) -> Session:
        size = math.prod(self.lengths.layouts(call, length)[0][0])
        if all(size > session.size for session in self.sessions.values()):
            # What one session leaves of the memory serves a smaller one, not a larger one.
            for key in self.sessions:
                self._met[key] = self.settings.graph_after, self._met.get(key, (0, 0))[1]
            self._start_over()
        session = self.sessions[self._key(call, length)] = Session(binding, size)
        if len(self.sessions) > self.settings.graph_shapes:
            self.sessions.popitem(last=False)
        return session

    def _start_over(self) -> None:
        """Gives up all recordings and their memory."""
        self.sessions.clear()
        self._recorders.clear()
        self._mailboxes.clear()

    def _longer(self, call: Call, length: int, binding: Binding) -> Chosen | None:
        """The session for the shortest sequences that are longer, but less than four times as long."""
        while (length := bucket(length + 1)) < 4 * (self.lengths.length(call) or 0):
            key = self._key(call, length)
            session = self._session(key, binding)
            if session is not None:
                self.sessions.move_to_end(key)
                return Chosen(session, length)
        return None

    def leave_room_for(self, x: torch.Tensor) -> None:
        """Before more elements than ever run eagerly, recordings go: without them there would be their memory, too.

        Args:
            x: the first tensor that a unit is called with.
        """
        with self.lock:
            if x.numel() > self._largest and not self.open_uses:
                self._largest = x.numel()
                self._start_over()

    def _why_not_recorded(self, key: Hashable, device: torch.device, binding: Binding) -> Refusal | None:
        """None where a session is to be made: ``key`` was met often enough, and the memory is there."""
        met, size = self._met.pop(key, (0, 0))
        self._met[key] = met + 1, size
        if len(self._met) > _KEYS_COUNTED:
            self._met.popitem(last=False)
        if met < self.settings.graph_after:
            return _NEW
        if not self.recorder(device).make_room(size + _optimizer_bytes(binding)):
            return _NO_ROOM
        self._met[key] = 0, size  # recorded anew only after it has recurred again
        return None

    def _measure(self, forward: ForwardContext, key: Hashable, device: torch.device) -> None:
        """Notes how much memory an eager forward holds for its backward: about what its recordings will hold."""
        recorder = self.recorder(device)
        before = recorder.allocated_bytes()

        def measured() -> None:
            met, _ = self._met.get(key, (0, 0))
            self._met[key] = met, max(0, recorder.allocated_bytes() - before)

        forward.at_end.append(measured)

    def count(self, refusal: Refusal) -> None:
        """Notes a call of a unit that runs eagerly."""
        if refusal.reason:
            self.reasons[refusal.reason] += 1

    def recorder(self, device: torch.device) -> Recorder:
        if device not in self._recorders:
            self._recorders[device] = make_recorder(device)
        return self._recorders[device]

    def mailbox(self, device: torch.device) -> Mailbox:
        return self._mailboxes.setdefault(device, Mailbox())

    def lines(self) -> list[str]:
        """Sentences for the report; none before the model was called."""
        if not self._met and not self.reasons:
            return []
        sessions = self.sessions.values()
        units = max((len({one.unit for one in session.captured.values()}) for session in sessions), default=0)
        shapes = f"{len(sessions)} shape{'s' if len(sessions) != 1 else ''}"
        held = sum(recorder.held_bytes() for recorder in self._recorders.values()) / 2**30
        eager = [f"graphs: {count} calls of layers ran eagerly: {why}" for why, count in self.reasons.items()]
        summary = f"graphs: {units} layers recorded for {shapes}, {held:.2f} GiB held, {self.replays} replays"
        return [summary, *eager]


GraphServed: TypeAlias = Served[None, GraphState]


def _optimizer_bytes(binding: Binding) -> int:
    """What a first step of Adam is going to add: a gradient and two moments in float32 for each trained parameter."""
    units = (facts for facts in binding.facts.values() if isinstance(facts, UnitFacts))
    return sum(12 * each.now().numel() for facts in units for each in facts.trained)
