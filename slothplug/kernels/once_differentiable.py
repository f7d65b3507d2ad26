"""A decorator for backward functions without a second derivative.

``torch.autograd.function.once_differentiable`` raises only if double backward reaches the node, and the incoming
gradient requires a gradient. The gradient that enters a loss is a constant, and ``autograd.grad`` runs only the nodes
between its inputs and outputs: there torch's version lets a second derivative through that silently lacks the kernel's
part. This one raises in the first backward.
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
        RuntimeError: in the decorated function, where a graph of the gradients is recorded (``create_graph=True``).
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "slothplug's kernels have no second derivative, but a graph of the gradients is recorded "
                "(create_graph=True). To differentiate gradients, undo the patch: slothplug.unpatch(model)."
            )
        return backward(ctx, *grad_outputs)

    return once
