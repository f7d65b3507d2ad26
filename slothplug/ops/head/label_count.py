"""How many labels count, known at the loss without a wait of its own.

Ignored tokens need no logits, so the loss leaves their rows out; for that the host must know how many are left. The
labels are on the GPU, and asking for a number there waits until all work before it is done. So the count is started
where the labels enter the outermost call, before the model computes anything. At the loss it has arrived, unless the
host is more than a whole forward ahead of the GPU; then the host waits until it is not, and the GPU goes on.

Between the two the model makes other labels of those: shifted by one, flattened, with prompt tokens before them. None
of that adds a label that counts, so the count is an upper bound, which is all that the loss needs. It is not taken on
trust: the first loss with a fair share of ignored labels counts its own, with one wait, and where they are more than
the bound, so does every later one.
"""

from __future__ import annotations

import torch

from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.predicates import plain

IGNORED = -100
"""The value of labels that the models of transformers ignore."""


_WORTH_IT = 7 / 8
"""Where more than this share of the labels may count, every row takes part: there is little to leave out, and a batch
with few ignored labels could not show that a model makes them count."""


class LabelCount:
    """The labels of one outermost call that are not ``IGNORED``.

    Attributes:
        size: the number of all labels.
    """

    def __init__(self, labels: torch.Tensor) -> None:
        self.size = labels.numel()
        count = (labels != IGNORED).sum()
        self._arrived: torch.cuda.Event | None = None
        if labels.device.type == "cuda":
            self._host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._host.copy_(count, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(labels.device))
        else:
            self._host = count

    @classmethod
    def start(cls, labels: object) -> LabelCount | None:
        """The count of ``labels``, where they are an ordinary tensor, and on no GPU that is being captured."""
        if not isinstance(labels, torch.Tensor) or not plain(labels) or labels.device.type not in ("cpu", "cuda"):
            return None
        return None if _captured(labels) else cls(labels)

    def value(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._host)


class LabelCounts(SharedState):
    """Starts the count at each outermost call of a model with a served head."""

    def begin(self, forward: ForwardContext) -> None:
        forward.notes[self] = LabelCount.start(forward.labels)

    def of(self, forward: ForwardContext) -> LabelCount | None:
        count: LabelCount | None = forward.notes.get(self)
        return count


class Bound:
    """Whether the count at the call bounds the one at the loss, for one head. Learnt at one of its first losses."""

    def __init__(self) -> None:
        self._holds: bool | None = None

    def max_valid(self, labels: torch.Tensor, ignore_index: int, count: LabelCount | None) -> int | None:
        """An upper bound for the ``labels`` that are not ``ignore_index``; None where every row is to take part."""
        if labels.device.type not in ("cpu", "cuda") or _captured(labels):
            return None
        if count is None or ignore_index != IGNORED or labels.numel() > count.size or self._holds is False:
            return _ask(labels, ignore_index)
        bound = count.value()
        if bound > _WORTH_IT * labels.numel():
            return None
        if self._holds is None:
            found = _ask(labels, ignore_index)
            self._holds = found <= bound
            # Where it holds the bound, as ever after: a checkpoint's second forward must save what its first did.
            return bound if self._holds else found
        return bound


def _captured(labels: torch.Tensor) -> bool:
    return labels.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ask(labels: torch.Tensor, ignore_index: int) -> int:
    """The exact number; on a GPU this waits for it."""
    return int((labels != ignore_index).sum())
