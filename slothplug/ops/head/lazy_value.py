"""A product that was put off: ``hidden @ weight.T + bias``, with an adapter's share where there is one, the steps
recorded on it, and how they become real.

Plain bookkeeping below autograd: nothing here is a tensor subclass or holds a graph. Values have the shapes, dtypes and
strides, and alias one another, exactly as if every step had been run at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from slothplug.errors import StaleLogitsError
from slothplug.kernels.cross_entropy import EpilogueStep, RowStatistics
from slothplug.kernels.linear_cross_entropy import LowRank
from slothplug.ops.head.statistics_policy import Readers
from slothplug.patching.served import Calls

aten = torch.ops.aten


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


class Product:
    """One call of an output head.

    Attributes:
        hidden: ``[..., H]``, as the head got it, with its graph.
        weight, bias: the head's ``[V, H]`` and ``[V]`` or None.
        dtype: what the operands are cast to first; differs from theirs under autocast only.
        loss: the fused loss, ``kernels.linear_cross_entropy``.
        chunk_bytes: budget for logits that are made a chunk at a time.
        readers: who reads of every row what its softmax says.
        low_rank: a LoRA adapter's share of the logits, or None. Its u is ``[..., r]``, with its graph and in the dtype
            that PEFT multiplies by B in, to which B is cast.
        state: what else the head multiplies by: it changes where an adapter is merged into the weight, which PEFT does
            through ``.data``.
        open: whether a loss may still be fused: the outermost call is running and nothing was read.
        loss_taken: whether a fused loss was computed.
        statistics: what it wrote down for the readers, of all rows in their order; None where none were expected.
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
        readers: Readers,
        low_rank: LowRank | None = None,
        state: Callable[[], object] | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.dtype = hidden, weight, bias, dtype
        self.loss, self.chunk_bytes, self.calls = loss, chunk_bytes, calls
        self.readers, self.low_rank, self.state = readers, low_rank, state
        self.statistics: RowStatistics | None = None
        self.open, self.loss_taken, self._was_read = True, False, False
        self._deferred: weakref.WeakSet[Deferred] = weakref.WeakSet()
        self._versions = self._current_versions()
        self._optimizer_steps: int | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """hidden, weight and bias in the product's dtype, as part of their graphs."""
        bias = self.bias.to(self.dtype) if self.bias is not None else None
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias

    def adapter(self, of_rows: Callable[[torch.Tensor], torch.Tensor]) -> LowRank | None:
        """The adapter's share for the rows that ``of_rows`` takes from u, in u's dtype, as part of its graph."""
        if self.low_rank is None:
            return None
        u, b, scaling = self.low_rank
        return LowRank(of_rows(u), b.to(u.dtype), scaling)

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

    def make_real(self, reason: str) -> None:
        """Computes everything that was put off and can still be reached, and ends fusing.

        All of it at once: memory that somebody holds can be written without our knowledge, and a copy that was recorded
        before must not see the write.

        Raises:
            StaleLogitsError: the head's weights may have changed since the call.
        """
        self.check_current()
        self.open = False
        if not self._was_read:
            self._was_read = True
            self.calls.fallbacks[reason] += 1
        for deferred in list(self._deferred):
            deferred.compute()

    def close(self, completed: bool) -> None:
        """Ends the time in which a loss may be fused: the outermost call is over.

        Where it took no fused loss, somebody else is going to read the logits, so they are made real now, while weights
        and hidden states are what they were.
        """
        self.open = False
        if not completed or not self._pending():
            return
        if not self.loss_taken:
            self.make_real("logits left the model without a loss")
        elif self._head_trains():
            self._optimizer_steps = _optimizer_steps_so_far()

    def check_current(self) -> None:
        """Raises ``StaleLogitsError`` where the product would no longer be what the head's call meant."""
        if any(weight.untyped_storage().nbytes() == 0 for weight in self._weights()):
            event = "the output head's sharded weights were freed"
        elif self._optimizer_steps is not None and self._optimizer_steps != _optimizer_steps_so_far():
            event = "an optimizer stepped"
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

    def add(self, deferred: Deferred) -> None:
        self._deferred.add(deferred)

    def _pending(self) -> bool:
        return any(not deferred.is_real for deferred in self._deferred)

    def _head_trains(self) -> bool:
        return any(weight.requires_grad for weight in self._weights())

    def _weights(self) -> list[torch.Tensor]:
        """The weights that values are computed from; A's part is in u already."""
        b = self.low_rank.b if self.low_rank is not None else None
        return [tensor for tensor in (self.weight, self.bias, b) if tensor is not None]

    def _current_versions(self) -> tuple[object, ...]:
        """What tells that a tensor is another than it was. A write through ``.data`` into its memory does not."""
        tensors = (self.hidden, *self._weights())
        state = self.state() if self.state is not None else None
        return (state, *((t.dtype, t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))


class Deferred:
    """The value of one lazy tensor: a product after the recorded steps."""

    __slots__ = ("__weakref__", "_parent", "_step", "_value", "meta", "product")

    def __init__(
        self, product: Product, meta: torch.Tensor, parent: Deferred | None = None, step: Step | None = None
    ) -> None:
        self.product, self.meta = product, meta
        self._parent, self._step = parent, step
        self._value: torch.Tensor | None = None
        product.add(self)

    @classmethod
    def start(cls, product: Product) -> Deferred:
        shape = (*product.hidden.shape[:-1], product.weight.shape[0])
        return cls(product, torch.empty(shape, dtype=product.dtype, device="meta"))

    def after(self, step: Step) -> Deferred:
        return Deferred(self.product, step(self.meta) if step.meta is None else step.meta, self, step)

    @property
    def is_real(self) -> bool:
        return self._value is not None

    def value(self, reason: str) -> torch.Tensor:
        """The real tensor, without a graph; the same one each time. ``reason`` says who asks first."""
        if self._value is None:
            self.product.make_real(reason)
        return self.compute()

    def compute(self) -> torch.Tensor:
        """The real tensor. A view is a view of its parent's."""
        if self._value is None:
            if self._parent is None or self._step is None:
                product = self.product
                self._value = product.linear(product.hidden, product.low_rank.u if product.low_rank else None)
            else:
                self._value = self._step(self._parent.compute())
            self._parent = self._step = None
        return self._value

    def steps(self) -> list[Step]:
        """The steps since the product, in order."""
        steps, at = [], self
        while at._parent is not None and at._step is not None:
            steps.append(at._step)
            at = at._parent
        return steps[::-1]

    def epilogue(self) -> list[EpilogueStep]:
        return [step.epilogue for step in self.steps() if step.epilogue is not None]

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of ``hidden`` ``[..., H]``, or of u, that this value's rows were made from, in its order."""
        for step in self.steps():
            hidden = step.rows(hidden) if step.rows is not None else hidden
        return hidden

    def room_for_readers(self) -> RowStatistics | None:
        """Room for what the loss of these values is to write down; None where nobody is expected to read it of them."""
        product = self.product
        if product.statistics is not None or product.dtype is torch.float64 or not self._is_of_the_product():
            return None
        if not all(step.rows is None or step.reshapes for step in self.steps()):
            return None
        return product.readers.expect(self.meta.shape[0], product.hidden.device, product.dtype)

    def argmax(self) -> torch.Tensor:
        """The most likely word of every row, ``[...]`` int64."""
        written = self._written()
        if written is not None:
            return self._own_rows(written.argmax)
        return self._by_chunks(lambda logits: logits.argmax(-1))

    def entropy(self) -> torch.Tensor:
        """The entropy of every row in nats, ``[...]`` float32, or float64 of such logits."""
        written = self._written()
        return self._own_rows(written.entropy) if written is not None else self._by_chunks(_entropy)

    def _written(self) -> RowStatistics | None:
        product = self.product
        if product.dtype is not torch.float64 and product.low_rank is None:
            product.readers.note(product.loss, product.hidden.device, product.dtype)
        return self.product.statistics if self._is_of_the_product() else None

    def _is_of_the_product(self) -> bool:
        """Whether its values are those that the loss sees: nothing but casts to float32.

        An adapter's share is rounded in another order there, which may decide between two words.
        """
        return self.product.low_rank is None and all(step == ("cast", torch.float32) for step in self.epilogue())

    def _own_rows(self, of_all: torch.Tensor) -> torch.Tensor:
        """A copy, dense as stock's results are, and the caller's to write into."""
        rows = self.rows(of_all.view(*self.product.hidden.shape[:-1], 1)).squeeze(-1)
        return rows.clone(memory_format=torch.contiguous_format)

    def _by_chunks(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.cat([function(logits) for logits in self.chunks()]).view(self.meta.shape[:-1])

    def chunks(self) -> Iterator[torch.Tensor]:
        """The value as ``[rows, V]`` pieces of at most ``chunk_bytes``, without keeping any."""
        self.product.check_current()
        elementwise = [step for step in self.steps() if step.epilogue is not None]
        low_rank = self.product.low_rank
        operands = (self.product.hidden,) if low_rank is None else (self.product.hidden, low_rank.u)
        row_bytes = self.meta.shape[-1] * max(self.product.dtype.itemsize, self.meta.element_size())
        size = max(1, self.product.chunk_bytes // row_bytes)
        parts = (self.rows(tensor.detach()).reshape(-1, tensor.shape[-1]).split(size) for tensor in operands)
        for hidden, *u in zip(*parts, strict=True):
            logits = self.product.linear(hidden, *(u or (None,)))
            for step in elementwise:
                logits = step(logits)
            yield logits


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return -(log_p.exp() * log_p).sum(-1)


class _StepCounter:
    """Counts the steps of all optimizers of the process, from the first time that somebody asks.

    A parameter's ``_version`` does not tell: fused optimizers and writes through ``.data`` leave it as it was.

    The hook that counts is put into torch once, and stays for as long as the process lives, also when every model is
    undone. Logits outlive the undo and even their model, and must raise after a step all the same. Nor could it go when
    the last of them is collected: that may happen while torch walks through its hooks, and would break the step. The
    hook adds one to a number and holds nothing of any model.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._registered = False

    def __call__(self, *_: object) -> None:
        self.steps += 1

    def so_far(self) -> int:
        if not self._registered:
            register_optimizer_step_post_hook(self)
            self._registered = True
        return self.steps


_optimizer_steps_so_far = _StepCounter().so_far


# Rules: what an operation on a deferred value records. A rule returns None where the operation needs real values.


Rule = Callable[..., "Step | list[Step] | None"]


def _factor(name: Literal["mul", "div"]) -> Rule:
    def rule(func: Any, logits: Deferred, factor: Any) -> Step | None:
        number = _as_number(factor)
        return (
            None
            if number is None or (name == "div" and number == 0)
            else Step(func, (number,), epilogue=(name, number), meta=torch.empty_like(logits.meta))
        )

    return rule


def _as_number(value: Any) -> float | None:
    """``value`` as a Python number, where that costs no wait and no gradient is owed to it."""
    if isinstance(value, (int, float)):
        return value
    if type(value) is torch.Tensor and value.ndim == 0 and value.is_floating_point():
        return value.item() if value.device.type == "cpu" and not value.requires_grad else None
    return None


def _tanh(func: Any, logits: Deferred) -> Step:
    return Step(func, epilogue=("tanh", None), meta=torch.empty_like(logits.meta))


def _cast(func: Any, logits: Deferred, *, dtype: torch.dtype | None = None, **options: Any) -> Step | None:
    device, layout = options.pop("device", None), options.pop("layout", None)
    options.pop("non_blocking", None)
    options.pop("pin_memory", None)
    if device is not None and torch.device(device) != logits.product.hidden.device:
        return None
    if layout not in (None, torch.strided) or (dtype is not None and not dtype.is_floating_point):
        return None
    return Step(func, (), {"dtype": dtype, **options}, epilogue=("cast", dtype) if dtype is not None else None)


def _copy(func: Any, logits: Deferred, **kwargs: Any) -> Step:
    return Step(func, (), kwargs)


def _view(func: Any, logits: Deferred, size: list[int]) -> Step | None:
    meta = func(logits.meta, size)
    if meta.ndim == 0 or meta.shape[-1] != logits.meta.shape[-1]:
        return None
    shape = tuple(meta.shape[:-1])
    return Step(func, (size,), rows=lambda hidden: hidden.reshape(*shape, hidden.shape[-1]), reshapes=True, meta=meta)


def _slice(
    func: Any, logits: Deferred, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Step | None:
    dim %= logits.meta.ndim
    args = (dim, start, end, step)
    if dim < logits.meta.ndim - 1:
        return Step(func, args, rows=lambda hidden: func(hidden, *args))
    meta = func(logits.meta, *args)
    return Step(func, args, meta=meta) if meta.shape == logits.meta.shape else None


def _select(func: Any, logits: Deferred, dim: int, index: int) -> Step | None:
    dim %= logits.meta.ndim
    if dim == logits.meta.ndim - 1:
        return None
    return Step(func, (dim, index), rows=lambda hidden: func(hidden, dim, index))


def _unsqueeze(func: Any, logits: Deferred, dim: int) -> Step | None:
    dim %= logits.meta.ndim + 1
    return Step(func, (dim,), rows=lambda hidden: func(hidden, dim)) if dim < logits.meta.ndim else None


def _squeeze(func: Any, logits: Deferred, dim: int) -> Step | None:
    dim %= logits.meta.ndim
    return Step(func, (dim,), rows=lambda hidden: func(hidden, dim)) if dim < logits.meta.ndim - 1 else None


def _split(func: Any, logits: Deferred, sizes: int | list[int], dim: int = 0) -> list[Step] | None:
    dim %= logits.meta.ndim
    if dim == logits.meta.ndim - 1:
        return None
    steps, start = [], 0
    for piece in func(logits.meta, sizes, dim):
        step = _slice(aten.slice.Tensor, logits, dim, start, start + piece.shape[dim])
        assert step is not None  # a slice of leading dimensions is always recorded
        steps.append(step)
        start += piece.shape[dim]
    return steps


def _unbind(func: Any, logits: Deferred, dim: int = 0) -> list[Step] | None:
    dim %= logits.meta.ndim
    steps = [_select(aten.select.int, logits, dim, index) for index in range(logits.meta.shape[dim])]
    return [step for step in steps if step is not None] if dim < logits.meta.ndim - 1 else None


def _index(func: Any, logits: Deferred, indices: list[torch.Tensor | None]) -> Step | None:
    """Rows chosen by masks or positions, as models do that shift and drop padding before the loss."""
    dims = sum(index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1 for index in indices)
    lead = logits.meta.shape[:-1]
    if dims > len(lead) or any(isinstance(index, torch.Tensor) and index.requires_grad for index in indices):
        return None
    own = [index.clone() if index is not None else None for index in indices]
    picked = func(torch.empty(lead, dtype=torch.bool, device=logits.product.hidden.device), own)
    meta = torch.empty((*picked.shape, logits.meta.shape[-1]), dtype=logits.meta.dtype, device="meta")
    return Step(lambda x: func(x, own).contiguous(), rows=lambda hidden: func(hidden, own), meta=meta)


RULES: dict[Any, Rule] = {
    aten.mul.Tensor: _factor("mul"),
    aten.div.Tensor: _factor("div"),
    aten.tanh.default: _tanh,
    aten._to_copy.default: _cast,
    aten.clone.default: _copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.index.Tensor: _index,
}
