"""How many labels count, known at the loss without waiting for the GPU.

Ignored tokens need no logits, so the loss leaves their rows out; for that the host must know how many are left. The
labels are on the GPU, and asking for a number there waits until all work before it is done. So the count is started
where the labels enter the outermost call, before the model computes anything, and has long arrived at the loss.

Between the two the model makes other labels of those: shifted by one, flattened, with prompt tokens before them. None
of that adds a label that counts, so the count is an upper bound, which is all that the loss needs. It is not taken on
trust: the first loss of a head counts its own labels, with one wait, and where they are more than the bound, so does
every later one.
"""

from __future__ import annotations

import torch

from slothplug.patching.sites import plain

IGNORED = -100
"""The value of labels that the models of transformers ignore."""


class LabelCount:
    """The labels of one outermost call that are not ``IGNORED``."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.size = labels.numel()
        self._host = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._host.copy_((labels != IGNORED).sum(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(labels.device))

    @classmethod
    def start(cls, labels: object) -> LabelCount | None:
        """The count of ``labels``, where they are an ordinary tensor on a GPU that is not being captured."""
        if not isinstance(labels, torch.Tensor) or not plain(labels) or labels.device.type != "cuda":
            return None
        return None if torch.cuda.is_current_stream_capturing() else cls(labels)

    def value(self) -> int:
        self._arrived.synchronize()
        return int(self._host)


class Bound:
    """Whether the count at the call bounds the one at the loss, for one head. Learnt at its first loss."""

    def __init__(self) -> None:
        self._holds: bool | None = None

    def max_valid(self, labels: torch.Tensor, ignore_index: int, count: LabelCount | None) -> int | None:
        """An upper bound for the ``labels`` that are not ``ignore_index``; None under capture, where nobody knows."""
        if labels.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        if count is None or ignore_index != IGNORED or labels.numel() > count.size:
            return _ask(labels, ignore_index)
        if self._holds is None:
            found = _ask(labels, ignore_index)
            self._holds = found <= count.value()
            return found
        return count.value() if self._holds else _ask(labels, ignore_index)


def _ask(labels: torch.Tensor, ignore_index: int) -> int:
    """The exact number; on a GPU this waits for it."""
    return int((labels != ignore_index).sum())
