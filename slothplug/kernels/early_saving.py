"""A node hands what it saves to hooks on saved tensors before it computes its outputs.

A checkpoint that is not reentrant recomputes until the last tensor that was saved in the forward is there again, and
ends the recompute with an exception in its hook. ``ctx.save_for_backward`` hands tensors over after ``forward`` has
returned: a layer whose output nobody saves, as the last one before a residual is added, would be computed for nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """In place of ``ctx.save_for_backward``, at any point of ``forward``; no tensor is an output of the node."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        ctx.packed = None
        ctx.save_for_backward(*tensors)
        return
    pack, ctx.unpack = hooks
    # As autograd hands them over: a leaf itself, of any other tensor nothing but the values.
    values = [one if one is None or one.is_leaf else one.detach() for one in tensors]
    ctx.packed = [None if one is None else (pack(one),) for one in values]


def saved(ctx: Any) -> tuple[Any, ...]:
    """In place of ``ctx.saved_tensors``, once in each backward; without ``retain_graph`` they are there once.

    Raises:
        RuntimeError: a second backward without ``retain_graph``.
    """
    if ctx.packed is None:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        return tensors
    if ctx.unpack is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: what a LoRA layer saved was freed by the first "
            "backward. Specify retain_graph=True there."
        )
    packed, unpack = ctx.packed, ctx.unpack
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.packed, ctx.unpack = (), None
    return tuple(None if one is None else unpack(*one) for one in packed)
