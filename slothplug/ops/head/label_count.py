"""How many labels count, known at the loss without a wait of its own.

Ignored tokens need no logits, so the loss leaves their rows out. For that the host must know an upper bound for the
number of the other rows. The labels are on the GPU, and asking for a number there waits until all work before it is
done. So the count is started where labels enter the outermost call, before the model computes anything. At the loss it
has arrived, unless the host is more than a whole forward ahead of the GPU; then the host waits for that.

Between the two the model makes other labels of those that it got: shifted by one, flattened, with prompt tokens in
front. A count is used for exactly the labels that provably come from the counted ones. Therefore the count travels with
the labels: the model gets them as ``CountedLabels``, the same memory as a subclass of ``torch.Tensor``. Operations that
take elements at most once, or put ``IGNORED`` in, return ``CountedLabels``; every other operation returns an ordinary
tensor. Labels of other origin, and labels that were written since, are counted at the loss, with a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from slothplug.ops.head.staleness import is_captured
from slothplug.patching.forward_context import ForwardContext
from slothplug.patching.model_context import SharedState
from slothplug.patching.predicates import plain
from slothplug.patching.transforms import why_not_now

IGNORED = -100
"""The value of labels that the models of transformers ignore."""

_LARGEST_VALID_SHARE = 7 / 8
"""Where more than this share of the labels may count, every row takes part: there is little to leave out."""


class LabelCount:
    """The number of ``labels`` that are not ``IGNORED``; counted on their device, without a wait."""

    def __init__(self, labels: torch.Tensor) -> None:
        count = (labels != IGNORED).sum()
        self._arrived: torch.cuda.Event | None = None
        if labels.device.type == "cuda":
            self._host = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._host.copy_(count, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(labels.device))
        else:
            self._host = count

    def value(self) -> int:
        """The number; waits until the device has counted."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._host)


class CountedLabels(torch.Tensor):
    """Labels of which at most ``bound()`` are not ``IGNORED``. Made by ``start`` and by operations on such labels."""

    _counts: tuple[LabelCount, ...]
    _uncounted: int
    """Number of elements of unknown origin among the labels."""
    _written: int
    """Version of the memory for which the bound holds; writes to any alias raise it."""

    @staticmethod
    def start(labels: object) -> CountedLabels | None:
        """``labels`` with their count; None where they are no ordinary int64 tensor or no count can be started now."""
        if not plain(labels) or labels.dtype is not torch.int64 or labels.device.type not in ("cpu", "cuda"):
            return None
        if labels.is_inference() or is_captured(labels.device) or why_not_now():
            return None
        return _with_counts(labels, (LabelCount(labels),), 0)

    def bound(self) -> int | None:
        """An upper bound for the number of labels that are not ``IGNORED``; None where the labels were written."""
        if self._version != self._written:
            return None
        return sum(count.value() for count in self._counts) + self._uncounted

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _changes_itself(func) and args and isinstance(args[0], cls):
            args[0]._written = -1
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        sources = _sources(func, args, kwargs)
        ignores = func is torch.Tensor.__setitem__ and _ignores_more(*args)
        result = func(*tree_map_only(cls, ordinary, args), **tree_map_only(cls, ordinary, kwargs))
        if ignores:
            args[0]._written = args[0]._version
        if sources is None:
            return result
        counts = tuple(count for source in sources if isinstance(source, cls) for count in source._counts)
        uncounted = sum(source._uncounted if isinstance(source, cls) else source.numel() for source in sources)
        return tree_map_only(torch.Tensor, lambda labels: _with_counts(labels, counts, uncounted), result)


def _changes_itself(func: Callable[..., Any]) -> bool:
    """True for in-place operations and for ``labels.data = ...``, which an alias would not pass on: shape, memory."""
    name = func.__name__
    return name == "__set__" or (name.endswith("_") and not name.endswith("__"))


def ordinary(labels: torch.Tensor) -> torch.Tensor:
    """``CountedLabels`` as the ordinary tensor that they are an alias of; any other tensor as it is."""
    return labels.as_subclass(torch.Tensor) if type(labels) is CountedLabels else labels


def max_valid(labels: torch.Tensor, ignore_index: int) -> int | None:
    """An upper bound for the number of ``labels`` that are not ``ignore_index``; None where every row is to take part.

    Waits for the device where the labels are no ``CountedLabels`` or ``ignore_index`` is another one than theirs.
    """
    if labels.device.type not in ("cpu", "cuda") or is_captured(labels.device):
        return None
    bound = labels.bound() if type(labels) is CountedLabels and ignore_index == IGNORED else None
    if bound is None:
        return _count_now(ordinary(labels), ignore_index)
    return None if bound > _LARGEST_VALID_SHARE * labels.numel() else bound


class LabelCounts(SharedState):
    """Counts the labels of each outermost call of a model with a served head."""

    def begin(self, forward: ForwardContext) -> None:
        for name, value in forward.keywords.items():
            if name.endswith("labels"):  # labels, and shift_labels of context parallelism
                counted = CountedLabels.start(value)
                if counted is not None:
                    forward.keywords[name] = counted


def _with_counts(labels: torch.Tensor, counts: tuple[LabelCount, ...], uncounted: int) -> Any:
    if labels.dtype is not torch.int64 or labels.is_inference():  # inference tensors do not tell that they were written
        return labels
    counted = labels.as_subclass(CountedLabels)
    counted._counts, counted._uncounted, counted._written = counts, uncounted, labels._version
    return counted


_TAKE_ELEMENTS: frozenset[Any] = frozenset(
    getattr(owner, name)
    for name in (
        "chunk", "clone", "contiguous", "cpu", "cuda", "detach", "flatten", "long", "narrow", "permute", "ravel",
        "reshape", "roll", "split", "squeeze", "t", "to", "transpose", "unbind", "unsqueeze", "view",
    )
    for owner in (torch.Tensor, torch)
    if hasattr(owner, name)
)  # fmt: skip
"""Functions whose results have every element of their first argument at most once."""


def _sources(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The tensors of which ``func`` takes each element at most once, to make labels; None where it does other things.

    What else is among the labels is ``IGNORED``.
    """
    if not args:
        return None
    sources: list[torch.Tensor] = [args[0]]
    if func is torch.cat:
        sources = list(args[0])
    elif func is torch.Tensor.__getitem__:
        if not all(map(_takes_once, args[1] if isinstance(args[1], tuple) else (args[1],))):
            return None
    elif func is F.pad:
        if not _is_ignored(_pad_value(*args, **kwargs)):
            return None
    elif func is torch.Tensor.masked_fill:
        if len(args) < 3 or not _is_ignored(args[2]) or args[1].shape != args[0].shape:
            return None
    elif func not in _TAKE_ELEMENTS:
        return None
    counted = [source for source in sources if isinstance(source, CountedLabels)]
    return sources if counted and all(labels._version == labels._written for labels in counted) else None


def _ignores_more(labels: torch.Tensor, index: object, value: object) -> bool:
    """True where ``labels[index] = value`` writes ``IGNORED`` into counted labels, for which the bound still holds."""
    return isinstance(labels, CountedLabels) and labels._version == labels._written and _is_ignored(value)


def _is_ignored(value: object) -> bool:
    return isinstance(value, (int, float)) and value == IGNORED


def _takes_once(index: object) -> bool:
    """True for an index, or a part of one, that chooses no element twice."""
    if isinstance(index, torch.Tensor):
        return index.dtype is torch.bool
    return index is None or index is Ellipsis or isinstance(index, (int, slice))


def _pad_value(input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> float | None:
    return value if mode == "constant" else None


def _count_now(labels: torch.Tensor, ignore_index: int) -> int:
    """The exact number; on a GPU this waits for it."""
    return int((labels != ignore_index).sum())
