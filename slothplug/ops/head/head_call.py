"""``HeadCall``: one call of an output head whose logits were put off, and how they are computed later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slothplug.errors import StaleLogitsError
from slothplug.kernels.cross_entropy import RowStatistics
from slothplug.kernels.linear_cross_entropy import LowRank
from slothplug.ops.head.staleness import WatchedWeights, is_freed
from slothplug.ops.head.statistics_policy import StatisticsPolicy
from slothplug.patching.served import Calls

if TYPE_CHECKING:
    from slothplug.ops.head.lazy_value import LazyValue


class HeadCall:
    """One call of an output head: ``hidden @ weight.T + bias``, with an adapter's share where there is one.

    Attributes:
        hidden: ``[..., H]``, as the head got it, with its graph.
        weight, bias: the head's ``[V, H]`` and ``[V]`` or None.
        dtype: what the operands are cast to first; differs from theirs under autocast only.
        loss: the fused loss, ``kernels.linear_cross_entropy``.
        chunk_bytes: budget for logits that are computed a chunk at a time.
        policy: whether the loss records statistics.
        low_rank: a LoRA adapter's share of the logits, or None. Its u is ``[..., r]``, with its graph and in the dtype
            that PEFT multiplies by B in, to which B is cast.
        merged: the adapters that are merged into the weight, which PEFT does through ``.data``.
        open: whether a loss may still be fused: the outermost call is running and nothing was read.
        loss_taken: whether a fused loss was computed.
        statistics: what that loss recorded, of all rows in their order; None where it recorded nothing.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        loss: Callable[..., torch.Tensor],
        chunk_bytes: int,
        calls: Calls,
        policy: StatisticsPolicy,
        low_rank: LowRank | None = None,
        merged: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.hidden, self.weight, self.bias, self.dtype = hidden, weight, bias, dtype
        self.loss, self.chunk_bytes, self.calls = loss, chunk_bytes, calls
        self.policy, self.low_rank, self.merged = policy, low_rank, merged
        self.statistics: RowStatistics | None = None
        self.open, self.loss_taken = True, False
        self._was_read = self._was_missed = False
        self._values: weakref.WeakSet[LazyValue] = weakref.WeakSet()
        self._versions = self._current_versions()
        self._watched: WatchedWeights | None = None

    def add(self, value: LazyValue) -> None:
        """Registers a value that is derived from this call's logits."""
        self._values.add(value)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """hidden, weight and bias in the product's dtype, as part of their graphs."""
        bias = self.bias.to(self.dtype) if self.bias is not None else None
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias

    def low_rank_of(self, take_rows: Callable[[torch.Tensor], torch.Tensor]) -> LowRank | None:
        """The adapter's share for the rows that ``take_rows`` takes from u, in u's dtype, as part of its graph."""
        if self.low_rank is None:
            return None
        u, b, scaling = self.low_rank
        return LowRank(take_rows(u), b.to(u.dtype), scaling)

    def linear(self, hidden: torch.Tensor, u: torch.Tensor | None) -> torch.Tensor:
        """The logits of rows of hidden, and of u where there is an adapter, without a graph, whatever autocast says
        now. Rounded where PEFT rounds.
        """
        weight, bias = self.weight.detach(), self.bias.detach() if self.bias is not None else None
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(
                hidden.detach().to(self.dtype), weight.to(self.dtype), bias.to(self.dtype) if bias is not None else None
            )
            if u is not None and self.low_rank is not None:
                _, b, scaling = self.low_rank
                logits += F.linear(u.detach(), b.detach().to(u.dtype)).mul_(scaling)
            return logits

    def compute_all(self, reason: str) -> None:
        """Computes every value that was put off and can still be reached, and ends fusing. ``reason``: who reads.

        All at once: memory that somebody holds can be written without our knowledge, and a copy that was recorded
        before must not see the write.

        Raises:
            StaleLogitsError: the head's weights may have changed since the call.
        """
        self.check_current()
        self.open = False
        if not self._was_read:
            self._was_read = True
            self.calls.fallbacks[reason] += 1
        for value in list(self._values):
            value.compute()

    def close(self, completed: bool) -> None:
        """Ends the time in which a loss may be fused: the outermost call is over.

        If no fused loss was taken, somebody else is going to read the logits. They are computed now, while weights and
        hidden states are what they were.
        """
        self.open = False
        if not completed or all(value.is_computed for value in self._values):
            return
        if not self.loss_taken:
            self.compute_all("logits left the model without a loss")
        elif trained := [weight for weight in self._weights() if weight.requires_grad]:
            self._watched = WatchedWeights(trained)

    def check_current(self) -> None:
        """Raises ``StaleLogitsError`` if the logits are no longer what the head's call meant."""
        if is_freed(self._weights()):
            event = "the output head's sharded weights were freed"
        elif self._watched is not None and (change := self._watched.change()):
            event = change
        elif self._versions != self._current_versions():
            event = "the output head's weights or the hidden states were written or replaced"
        else:
            return
        raise StaleLogitsError(
            f"The model's logits can no longer be computed: since the call that they belong to, {event}. Under "
            f"use_fast_kernels the loss is computed without holding the logits; whoever reads them has them computed "
            f"then. Read them before that happens, or set use_fast_kernels: {{keep_logits: true}}, which computes and "
            f"holds them in every call, as without slothplug."
        )

    def note_missed(self, reason: str) -> None:
        """Reports, once a call, that statistics are computed from logits, and why."""
        if not self._was_missed:
            self._was_missed = True
            self.calls.remarks[f"entropy or argmax of the logits is computed from logits: {reason}"] += 1

    def _weights(self) -> list[torch.Tensor]:
        """The weights that values are computed from; A's part is in u already."""
        b = self.low_rank.b if self.low_rank is not None else None
        return [tensor for tensor in (self.weight, self.bias, b) if tensor is not None]

    def _current_versions(self) -> tuple[object, ...]:
        """Differs where a tensor was written or replaced, except by a write through ``.data`` into its memory."""
        tensors = (self.hidden, *self._weights())
        return (self.merged(), *((t.dtype, t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))
