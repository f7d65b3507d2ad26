"""The rows that count, those whose label is not ``ignore_index``: taken out of all rows, weighted, and put back.

``max_valid`` is the bound for their number that the caller of ``linear_cross_entropy`` may give, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slothplug.kernels.cross_entropy import loss_arithmetic
from slothplug.kernels.products import dense_rows


class Rows(NamedTuple):
    """The rows that take part: all of ``hidden`` and ``u``, or those that ``keep`` [rows] names; ``labels`` [rows] are
    theirs.

    Where fewer rows count than there was room for, ``keep`` names a row behind the last, whose label is ignored.
    """

    hidden: torch.Tensor
    u: torch.Tensor | None
    labels: torch.Tensor
    keep: torch.Tensor | None

    def chunk(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of hidden and of u, ready to be the left operands of products."""
        if self.keep is None:
            u = None if self.u is None else dense_rows(self.u[start:stop])
            return dense_rows(self.hidden[start:stop]), u
        kept = self.keep[start:stop].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, kept), None if self.u is None else self.u.index_select(0, kept)


def select_rows(
    hidden: torch.Tensor, u: torch.Tensor | None, labels: torch.Tensor, ignore_index: int, max_valid: int | None
) -> Rows:
    """``max_valid`` rows, all that count among them; every row where there is no bound, or none below their number."""
    count = labels.numel()
    if max_valid is None or max_valid >= count:
        return Rows(hidden, u, labels, None)
    counted = labels != ignore_index
    rank = counted.cumsum(0) - 1
    rank = torch.where(counted & (rank < max_valid), rank, max_valid)
    keep = labels.new_full((max_valid + 1,), count)
    keep = keep.scatter_(0, rank, torch.arange(count, device=labels.device))[:max_valid]
    kept = labels.index_select(0, keep.clamp(max=count - 1)).masked_fill(keep == count, ignore_index)
    return Rows(hidden, u, kept, keep)


def put_back(kept: torch.Tensor, keep: torch.Tensor, count: int) -> torch.Tensor:
    """``kept`` [rows, ...] where ``keep`` says, in [count, ...] of zeros; what lies behind ``count`` is dropped."""
    return kept.new_zeros(count + 1, *kept.shape[1:]).index_copy_(0, keep, kept)[:count]


def exceeds_bound(labels: torch.Tensor, ignore_index: int, max_valid: int | None) -> torch.Tensor | None:
    """Whether more labels count than ``max_valid``, 0-d; None where they cannot. Raises on a CPU, where it is free."""
    if max_valid is None or max_valid >= labels.numel():
        return None
    found = (labels != ignore_index).sum()
    if labels.device.type == "cpu" and found > max_valid:
        raise ValueError(f"max_valid is {max_valid}, and {found.item()} labels are not {ignore_index}")
    return found > max_valid


def weigh_rows(
    labels: torch.Tensor, class_weight: torch.Tensor | None, vocabulary: int, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Each row's class weight, 0 where it is ignored."""
    counted = labels != ignore_index
    _check_labels(labels, counted, vocabulary)
    if class_weight is None:
        return counted.to(loss_arithmetic(dtype))
    chosen = class_weight.to(loss_arithmetic(dtype))[labels.clamp(0, vocabulary - 1)]
    return torch.where(counted, chosen, 0.0)


def _check_labels(labels: torch.Tensor, counted: torch.Tensor, vocabulary: int) -> None:
    """Raises what ``F.cross_entropy`` does for a label out of range: on a CPU IndexError, on a GPU an assertion."""
    valid = (labels >= 0) & (labels < vocabulary) | ~counted
    if labels.device.type != "cpu":
        torch._assert_async(valid.all(), "linear_cross_entropy: a label is out of the range of the vocabulary")
    elif not valid.all():
        raise IndexError(f"Target {labels[~valid][0].item()} is out of bounds.")
