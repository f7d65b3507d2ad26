"""Values of lazy tensors: the product of a head's call and the steps recorded on it, computed when they are read.

Plain bookkeeping below autograd: nothing here is a tensor subclass or holds a graph. Values have the shapes, dtypes and
strides, and alias one another, exactly as if every step had been run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from slothplug.kernels.cross_entropy import EpilogueStep, RowStatistics
from slothplug.ops.head.head_call import HeadCall


class Step(NamedTuple):
    """One recorded operation on logits ``[..., V]``.

    Attributes:
        func, args, kwargs: the operation, whose first argument is the tensor.
        rows: the same choice or order of rows on hidden states ``[..., H]``; None where rows stay what they are.
        reshapes: whether ``rows`` chooses all rows in their order.
        epilogue: the step as the fused loss knows it; None where values stay what they are.
        meta: the result on the ``meta`` device, where ``func`` cannot run there or is slow: elementwise operations go
            through Python there and take a millisecond.
    """

    func: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (never written)
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    reshapes: bool = False
    epilogue: EpilogueStep | None = None
    meta: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.func(x, *self.args, **self.kwargs)


class LazyValue:
    """The value of one lazy tensor: the logits of a head's call after the recorded steps."""

    __slots__ = ("__weakref__", "_computed", "_parent", "_step", "call", "meta")

    def __init__(
        self, call: HeadCall, meta: torch.Tensor, parent: LazyValue | None = None, step: Step | None = None
    ) -> None:
        self.call, self.meta = call, meta
        self._parent, self._step = parent, step
        self._computed: torch.Tensor | None = None
        call.add(self)

    @classmethod
    def start(cls, call: HeadCall) -> LazyValue:
        """The logits themselves, ``[..., V]`` of ``call.dtype``."""
        shape = (*call.hidden.shape[:-1], call.weight.shape[0])
        return cls(call, torch.empty(shape, dtype=call.dtype, device="meta"))

    def after(self, step: Step) -> LazyValue:
        """The value of ``step`` on this one."""
        return LazyValue(self.call, step(self.meta) if step.meta is None else step.meta, self, step)

    @property
    def is_computed(self) -> bool:
        return self._computed is not None

    def read(self, reason: str) -> torch.Tensor:
        """The computed tensor, without a graph; the same one each time. ``reason`` says who asks first."""
        if self._computed is None:
            self.call.compute_all(reason)
        return self.compute()

    def compute(self) -> torch.Tensor:
        """The computed tensor. A view is a view of its parent's."""
        if self._computed is None:
            if self._parent is None or self._step is None:
                call = self.call
                self._computed = call.linear(call.hidden, call.low_rank.u if call.low_rank else None)
            else:
                self._computed = self._step(self._parent.compute())
            self._parent = self._step = None
        return self._computed

    def steps(self) -> list[Step]:
        """The steps since the product, in order."""
        steps, at = [], self
        while at._parent is not None and at._step is not None:
            steps.append(at._step)
            at = at._parent
        return steps[::-1]

    def epilogue(self) -> list[EpilogueStep]:
        """The steps that change values, as the fused loss knows them."""
        return [step.epilogue for step in self.steps() if step.epilogue is not None]

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of ``hidden`` ``[..., H]``, or of u, that this value's rows were made from, in its order."""
        for step in self.steps():
            hidden = step.rows(hidden) if step.rows is not None else hidden
        return hidden

    def room_for_statistics(self) -> RowStatistics | None:
        """Room for what the loss of these values is to record; None where it is to record nothing."""
        call = self.call
        if call.statistics is not None or self._why_not_of_the_loss() is not None:
            return None
        if not all(step.rows is None or step.reshapes for step in self.steps()):
            return None
        return call.policy.room(self.meta.shape[0], call.hidden.device, call.dtype)

    def argmax(self) -> torch.Tensor:
        """The most likely token of every row, ``[...]`` int64."""
        recorded = self._recorded()
        if recorded is not None:
            return self._own_rows(recorded.argmax)
        return self._by_chunks(lambda logits: logits.argmax(-1))

    def entropy(self) -> torch.Tensor:
        """The entropy of every row in nats, ``[...]`` float32, or float64 of such logits."""
        recorded = self._recorded()
        return self._own_rows(recorded.entropy) if recorded is not None else self._by_chunks(_entropy)

    def _recorded(self) -> RowStatistics | None:
        call = self.call
        call.policy.note_read()
        reason = self._why_not_of_the_loss()
        if reason is None and call.statistics is not None:
            return call.statistics
        if reason is None:
            refusal = call.policy.why_not(call.dtype)
            reason = refusal.reason if refusal is not None else "no loss of all tokens was computed before"
        call.note_missed(reason)
        return None

    def _why_not_of_the_loss(self) -> str | None:
        """Why these values are not those that the loss sees; None where they are, but for casts to float32."""
        if self.call.low_rank is not None:
            # The loss rounds it in another order, which may decide between two tokens.
            return "an adapter is on the head"
        if any(step != ("cast", torch.float32) for step in self.epilogue()):
            return "they were scaled, capped or cast"
        return None

    def _own_rows(self, of_all: torch.Tensor) -> torch.Tensor:
        """A copy, dense as stock's results are, which the caller may write into."""
        rows = self.rows(of_all.view(*self.call.hidden.shape[:-1], 1)).squeeze(-1)
        return rows.clone(memory_format=torch.contiguous_format)

    def _by_chunks(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.cat([function(logits) for logits in self.chunks()]).view(self.meta.shape[:-1])

    def chunks(self) -> Iterator[torch.Tensor]:
        """The value as ``[rows, V]`` pieces of at most ``chunk_bytes``, without keeping any."""
        call = self.call
        call.check_current()
        elementwise = [step for step in self.steps() if step.epilogue is not None]
        operands = (call.hidden,) if call.low_rank is None else (call.hidden, call.low_rank.u)
        row_bytes = self.meta.shape[-1] * max(call.dtype.itemsize, self.meta.element_size())
        size = max(1, call.chunk_bytes // row_bytes)
        parts = (self.rows(tensor.detach()).reshape(-1, tensor.shape[-1]).split(size) for tensor in operands)
        for hidden, *u in zip(*parts, strict=True):
            logits = call.linear(hidden, *(u or (None,)))
            for step in elementwise:
                logits = step(logits)
            yield logits


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return -(log_p.exp() * log_p).sum(-1)
