"""What an operation on lazy logits records: one rule for each ATen operation that needs no values.

``OP_RULES[func](func, logits, *args, **kwargs)`` returns the ``Step``, or a list of them for an operation with several
results, or None where the operation needs computed values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from slothplug.ops.head.lazy_value import LazyValue, Step

aten = torch.ops.aten

Rule = Callable[..., "Step | list[Step] | None"]


def _factor(name: Literal["mul", "div"]) -> Rule:
    def rule(func: Any, logits: LazyValue, factor: Any) -> Step | None:
        number = _as_number(factor)
        if number is None or (name == "div" and number == 0):
            return None
        return Step(func, (number,), epilogue=(name, number), meta=torch.empty_like(logits.meta))

    return rule


def _as_number(value: Any) -> float | None:
    """``value`` as a Python number, where that costs no wait and no gradient is owed to it."""
    if isinstance(value, (int, float)):
        return value
    if type(value) is torch.Tensor and value.ndim == 0 and value.is_floating_point():
        return value.item() if value.device.type == "cpu" and not value.requires_grad else None
    return None


def _tanh(func: Any, logits: LazyValue) -> Step:
    return Step(func, epilogue=("tanh", None), meta=torch.empty_like(logits.meta))


def _cast(func: Any, logits: LazyValue, *, dtype: torch.dtype | None = None, **options: Any) -> Step | None:
    device, layout = options.pop("device", None), options.pop("layout", None)
    options.pop("non_blocking", None)
    options.pop("pin_memory", None)
    if device is not None and torch.device(device) != logits.call.hidden.device:
        return None
    if layout not in (None, torch.strided) or (dtype is not None and not dtype.is_floating_point):
        return None
    return Step(func, (), {"dtype": dtype, **options}, epilogue=("cast", dtype) if dtype is not None else None)


def _copy(func: Any, logits: LazyValue, **kwargs: Any) -> Step:
    return Step(func, (), kwargs)


def _view(func: Any, logits: LazyValue, size: list[int]) -> Step | None:
    meta = func(logits.meta, size)
    if meta.ndim == 0 or meta.shape[-1] != logits.meta.shape[-1]:
        return None
    shape = tuple(meta.shape[:-1])
    return Step(func, (size,), rows=lambda hidden: hidden.reshape(*shape, hidden.shape[-1]), reshapes=True, meta=meta)


def _slice(
    func: Any, logits: LazyValue, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Step | None:
    dim %= logits.meta.ndim
    args = (dim, start, end, step)
    if dim < logits.meta.ndim - 1:
        return Step(func, args, rows=lambda hidden: func(hidden, *args))
    meta = func(logits.meta, *args)
    return Step(func, args, meta=meta) if meta.shape == logits.meta.shape else None


def _select(func: Any, logits: LazyValue, dim: int, index: int) -> Step | None:
    dim %= logits.meta.ndim
    if dim == logits.meta.ndim - 1:
        return None
    return Step(func, (dim, index), rows=lambda hidden: func(hidden, dim, index))


def _unsqueeze(func: Any, logits: LazyValue, dim: int) -> Step | None:
    dim %= logits.meta.ndim + 1
    return Step(func, (dim,), rows=lambda hidden: func(hidden, dim)) if dim < logits.meta.ndim else None


def _squeeze(func: Any, logits: LazyValue, dim: int) -> Step | None:
    dim %= logits.meta.ndim
    return Step(func, (dim,), rows=lambda hidden: func(hidden, dim)) if dim < logits.meta.ndim - 1 else None


def _split(func: Any, logits: LazyValue, sizes: int | list[int], dim: int = 0) -> list[Step] | None:
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


def _unbind(func: Any, logits: LazyValue, dim: int = 0) -> list[Step] | None:
    dim %= logits.meta.ndim
    steps = [_select(aten.select.int, logits, dim, index) for index in range(logits.meta.shape[dim])]
    return [step for step in steps if step is not None] if dim < logits.meta.ndim - 1 else None


def _index(func: Any, logits: LazyValue, indices: list[torch.Tensor | None]) -> Step | None:
    """Rows chosen by masks or positions, as models do that shift and drop padding before the loss."""
    dims = sum(index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1 for index in indices)
    lead = logits.meta.shape[:-1]
    if dims > len(lead) or any(isinstance(index, torch.Tensor) and index.requires_grad for index in indices):
        return None
    own = [index.clone() if index is not None else None for index in indices]
    picked = func(torch.empty(lead, dtype=torch.bool, device=logits.call.hidden.device), own)
    meta = torch.empty((*picked.shape, logits.meta.shape[-1]), dtype=logits.meta.dtype, device="meta")
    return Step(lambda x: func(x, own).contiguous(), rows=lambda hidden: func(hidden, own), meta=meta)


OP_RULES: dict[Any, Rule] = {
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
