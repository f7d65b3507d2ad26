"""Valid rows, those whose label is not ``ignore_index``: selected from all rows, weighted, and scattered back.

``max_valid`` is the upper bound of their number that the caller of ``linear_cross_entropy`` may give, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slothplug.kernels.cross_entropy import loss_arithmetic
from slothplug.kernels.matmul import dense_rows


class Rows(NamedTuple):
    """The rows that take part in the products.

    Attributes:
        hidden: [N, H].
        u: [N, r] of the low-rank term, or None.
        labels: [M] int64, of the rows that take part.
        indices: [M] int64, which of the N rows take part; None where all do, and M is N. Unused slots hold N, and their
            label is ignored.
    """

    hidden: torch.Tensor
    u: torch.Tensor | None
    labels: torch.Tensor
    indices: torch.Tensor | None

    def chunk(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows ``start`` to ``stop`` of hidden and of u, ready to be the left operands of products."""
        if self.indices is None:
            u = None if self.u is None else dense_rows(self.u[start:stop])
            return dense_rows(self.hidden[start:stop]), u
        chosen = self.indices[start:stop].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, chosen), None if self.u is None else self.u.index_select(0, chosen)


def select_rows(
    hidden: torch.Tensor, u: torch.Tensor | None, labels: torch.Tensor, ignore_index: int, max_valid: int | None
) -> Rows:
    """``max_valid`` rows with all valid ones among them; every row where there is no bound below their number."""
    count = labels.numel()
    if max_valid is None or max_valid >= count:
        return Rows(hidden, u, labels, None)
    valid = labels != ignore_index
    slot = valid.cumsum(0) - 1
    slot = torch.where(valid & (slot < max_valid), slot, max_valid)
    indices = labels.new_full((max_valid + 1,), count)
    indices = indices.scatter_(0, slot, torch.arange(count, device=labels.device))[:max_valid]
    selected = labels.index_select(0, indices.clamp(max=count - 1)).masked_fill(indices == count, ignore_index)
    return Rows(hidden, u, selected, indices)


def scatter_rows(rows: torch.Tensor, indices: torch.Tensor, count: int) -> torch.Tensor:
    """``rows`` [M, ...] at ``indices`` [M] of a new [count, ...] tensor of zeros, without those at index ``count``."""
    return rows.new_zeros(count + 1, *rows.shape[1:]).index_copy_(0, indices, rows)[:count]


def exceeds_bound(labels: torch.Tensor, ignore_index: int, max_valid: int | None) -> torch.Tensor | None:
    """Whether more than ``max_valid`` labels are valid, 0-d bool; None where they cannot be.

    Raises:
        ValueError: on a CPU, where reading the answer does not wait for a device.
    """
    if max_valid is None or max_valid >= labels.numel():
        return None
    found = (labels != ignore_index).sum()
    if labels.device.type == "cpu" and found > max_valid:
        raise ValueError(f"max_valid is {max_valid}, and {found.item()} labels are not {ignore_index}")
    return found > max_valid


def weigh_rows(
    labels: torch.Tensor, class_weight: torch.Tensor | None, vocabulary: int, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Each row's class weight [M], 0 where its label is ignored, in the loss's arithmetic for logits of ``dtype``."""
    valid = labels != ignore_index
    _check_labels(labels, valid, vocabulary)
    if class_weight is None:
        return valid.to(loss_arithmetic(dtype))
    chosen = class_weight.to(loss_arithmetic(dtype))[labels.clamp(0, vocabulary - 1)]
    return torch.where(valid, chosen, 0.0)


def _check_labels(labels: torch.Tensor, valid: torch.Tensor, vocabulary: int) -> None:
    """Raises what ``F.cross_entropy`` does for a label out of range: on a CPU IndexError, on a GPU an assertion."""
    in_range = (labels >= 0) & (labels < vocabulary) | ~valid
    if labels.device.type != "cpu":
        torch._assert_async(in_range.all(), "linear_cross_entropy: a label is out of the range of the vocabulary")
    elif not in_range.all():
        raise IndexError(f"Target {labels[~in_range][0].item()} is out of bounds.")
