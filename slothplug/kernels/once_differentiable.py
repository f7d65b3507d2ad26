"""Backward passes that refuse to be differentiated themselves.

``torch.autograd.function.once_differentiable`` refuses late: where the incoming gradient requires a gradient and the
second pass comes by the node. After a loss, whose incoming gradient is a constant, and in ``autograd.grad``, which runs
no node off its way, a second derivative silently lacks all that goes through the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorates the ``backward`` of an ``autograd.Function`` that computes gradients without recording a graph.

    Raises:
        RuntimeError: from the decorated function, where a graph of the gradients is wanted (``create_graph=True``).
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "slothplug's kernels have no second derivative, and the graph for one was asked for "
                "(create_graph=True). Undo the patch (slothplug.unpatch(model)) where gradients are differentiated."
            )
        return backward(ctx, *grad_outputs)

    return once
