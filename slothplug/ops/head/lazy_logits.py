"""Lazy logits: what a served output head returns while nobody but the loss is expected to read them.

``hidden @ weight.T + bias``, with an adapter's ``scaling * u @ b.T`` where there is one, is one node of the graph
(``_LazyLinear``); whatever follows has stock nodes. Three things happen to lazy logits:

- elementwise operations, casts, and choices and orders of rows are recorded (``op_rules``);
- ``F.cross_entropy`` on them, inside the call of the model, is the fused loss with the recorded steps as epilogue
  (``fused_loss``); ``argmax`` over the vocabulary, and the entropy (``log_probabilities``), are what that loss recorded
  for them, or computed a chunk at a time;
- every other operation computes the values. From then on nothing of this head's call is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F

from slothplug.ops.head.fused_loss import fused_cross_entropy
from slothplug.ops.head.head_call import HeadCall
from slothplug.ops.head.lazy_tensor import LazyTensor, aten
from slothplug.ops.head.lazy_value import LazyValue, Step
from slothplug.ops.head.log_probabilities import LazyLogProbabilities
from slothplug.ops.head.op_rules import OP_RULES


class LazyLogits(LazyTensor):
    """Logits whose values are computed when they are read. Made by ``put_off``."""

    _fusable: bool
    """Whether the graph above the values holds the recorded steps and nothing else (no custom Function, say)."""

    @classmethod
    def of(cls, value: LazyValue, fusable: bool) -> Self:
        """Lazy logits of ``value``, without a graph."""
        self = cls._make(value)
        self._fusable = fusable
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            loss = _loss(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        return super().__torch_function__(func, types, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.detach.default or func is aten.alias.default:
            return LazyLogits.of(self._value, self._stays_fusable())
        if self._value.is_computed:
            return None
        if func is aten.argmax.default:
            return _argmax(self._value, *args, **kwargs)
        if func is aten._log_softmax.default:
            return _log_softmax(self, *args, **kwargs)
        if func in OP_RULES:
            step = OP_RULES[func](func, self._value, *args, **kwargs)
            return self._after(step) if step is not None else None
        # In inference mode, composite operations arrive whole.
        return func.decompose(self, *args, **kwargs) if func._can_decompose() else None

    def _after(self, step: Step | list[Step]) -> LazyLogits | list[LazyLogits]:
        fusable = self._stays_fusable()
        if isinstance(step, list):
            return [LazyLogits.of(self._value.after(one), fusable) for one in step]
        return LazyLogits.of(self._value.after(step), fusable)

    def _stays_fusable(self) -> bool:
        """False inside a custom Function's forward: its result gets that Function's history, not the recorded steps."""
        return self._fusable and (torch.is_grad_enabled() or not self.requires_grad)


def put_off(call: HeadCall) -> LazyLogits:
    """The logits of ``call``, ``[..., V]`` of ``call.dtype``, in the graph of its operands and without values."""
    u, b, _ = call.low_rank or (None, None, 1.0)
    operands = (call.hidden, call.weight, call.bias, u, b)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands):
        logits: LazyLogits = _LazyLinear.apply(*operands, call)
        return logits
    return LazyLogits.of(LazyValue.start(call), fusable=True)


class _LazyLinear(torch.autograd.Function):
    """``F.linear``, and an adapter's share, without their forward.

    The backward runs where a gradient was derived from computed logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        u: torch.Tensor | None,
        b: torch.Tensor | None,
        call: HeadCall,
    ) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias, u, b)
        ctx.scaling = call.low_rank.scaling if call.low_rank is not None else 1.0
        ctx.set_materialize_grads(False)
        return LazyLogits.of(LazyValue.start(call), fusable=True)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        hidden, weight, bias, u, b = ctx.saved_tensors
        grad_hidden = grad_weight = grad_bias = grad_u = grad_b = None
        with torch.autocast(hidden.device.type, enabled=False):
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            if ctx.needs_input_grad[0]:
                grad_hidden = (grad_output @ weight.to(grad_output.dtype)).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                inputs = hidden.reshape(-1, hidden.shape[-1]).to(grad_output.dtype)
                grad_weight = (rows.t() @ inputs).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(bias.dtype)
            if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
                scaled = grad_output.to(u.dtype) * ctx.scaling
                if ctx.needs_input_grad[3]:
                    grad_u = scaled @ b.to(u.dtype)
                if ctx.needs_input_grad[4]:
                    grad_b = (scaled.reshape(-1, scaled.shape[-1]).t() @ u.reshape(-1, u.shape[-1])).to(b.dtype)
        return grad_hidden, grad_weight, grad_bias, grad_u, grad_b, None


def _loss(input: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """``F.cross_entropy`` as the fused loss; None where that is not the same thing."""
    if not isinstance(input, LazyLogits) or not input._fusable:
        return None
    return fused_cross_entropy(input._value, input, *args, **kwargs)


def _argmax(value: LazyValue, dim: int | None = None, keepdim: bool = False) -> torch.Tensor | None:
    if dim not in (-1, value.meta.ndim - 1) or value.meta.numel() == 0:
        return None
    found = value.argmax()
    return found.unsqueeze(-1) if keepdim else found


def _log_softmax(logits: LazyLogits, dim: int, half_to_float: bool) -> LazyLogProbabilities | None:
    """Lazy too, except where a graph needs it."""
    if half_to_float or dim not in (-1, logits.ndim - 1) or logits.numel() == 0:
        return None
    if torch.is_grad_enabled() and logits.requires_grad:
        return None
    return LazyLogProbabilities.of(logits._value, "log p")
