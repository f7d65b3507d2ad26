"""Lazy logits: what a served output head returns while nobody but the loss is expected to read it.

A ``LazyLogits`` is a ``torch.Tensor`` with the shape, dtype, device and autograd history of the logits, whose values
are computed when they are asked for. Autograd runs above it and records every operation as on any tensor: only values
are put off. ``hidden @ weight.T + bias``, with an adapter's ``scaling * u @ b.T`` where there is one, is one node of
the graph (``_PutOff``), whatever follows has stock nodes. So hooks, custom autograd Functions, views, in-place writes
and DDP's search for unused parameters see what they would see in stock.

Three things happen to it:

- elementwise operations, casts, and choices and orders of rows are recorded (``deferred.RULES``);
- ``F.cross_entropy`` on it, inside the call of the model, is the fused loss with the recorded steps as epilogue;
  ``argmax`` over the vocabulary, and the entropy (``log_probabilities``), are what that loss wrote down for them, or
  taken a chunk at a time;
- everything else computes the values, once, and goes on with them. From then on nothing of this head's call is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from slothplug.errors import StaleLogitsError
from slothplug.kernels.cross_entropy import RowStatistics
from slothplug.ops.head.label_count import max_valid, ordinary
from slothplug.ops.head.lazy_value import RULES, Deferred, Product, Step, aten
from slothplug.patching.predicates import plain

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
# Functions that look at a tensor's memory or Python state and so need an ordinary tensor.
_NEED_MEMORY: frozenset[Any] = frozenset(
    {
        torch.Tensor.data_ptr,
        _GET_DATA,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
        torch.Tensor._typed_storage,
        torch.Tensor.is_shared,
        torch.Tensor.share_memory_,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__cuda_array_interface__.__get__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
    }
)
_ENGINES = ("torch.distributed.", "deepspeed.")
_HOOKS: frozenset[Any] = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad})


class LazyLogits(torch.Tensor):
    """Logits whose values are computed when they are read. Made by ``put_off``."""

    _deferred: Deferred
    _fusable: bool
    """Whether the graph above the values holds the recorded steps and nothing else (no custom Function, say)."""

    @staticmethod
    def __new__(cls, deferred: Deferred, fusable: bool) -> LazyLogits:
        meta = deferred.meta
        self: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=deferred.product.hidden.device,
        )
        self._deferred, self._fusable = deferred, fusable
        return self

    def __init__(self, deferred: Deferred, fusable: bool) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _fused_cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        elif func in _NEED_MEMORY:
            return func(*(_ordinary(arg, func) for arg in args), **kwargs)
        elif func in _HOOKS:
            _prepare_for_hook(args[0], *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.mul.Tensor and not isinstance(args[0], LazyLogits):
            args = args[::-1]
        if isinstance(args[0], LazyLogits):
            result = args[0]._put_off_further(func, args[1:], kwargs)
            if result is not None:
                return result
        return _with_values(func, args, kwargs)

    def _put_off_further(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives without the values; None where it needs them."""
        if func is aten.detach.default or func is aten.alias.default:
            return LazyLogits(self._deferred, _stays_fusable(self))
        if self._deferred.is_real:
            return None
        if func is aten.argmax.default:
            return _argmax(self._deferred, *args, **kwargs)
        if func is aten._log_softmax.default:
            from slothplug.ops.head import log_probabilities  # which are a kind of lazy logits

            return log_probabilities.put_off(self, *args, **kwargs)
        if func in RULES:
            step = RULES[func](func, self._deferred, *args, **kwargs)
            return _derived(self, step) if step is not None else None
        # In inference mode, composite operations arrive whole.
        return func.decompose(self, *args, **kwargs) if func._can_decompose() else None


class _PutOff(torch.autograd.Function):
    """``F.linear``, and an adapter's share, without their forward.

    The backward runs where a gradient was derived from real logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        u: torch.Tensor | None,
        b: torch.Tensor | None,
        product: Product,
    ) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias, u, b)
        ctx.scaling = product.low_rank.scaling if product.low_rank is not None else 1.0
        ctx.set_materialize_grads(False)
        return LazyLogits(Deferred.start(product), fusable=True)

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


class _Ordinary(torch.autograd.Function):
    """An ordinary tensor with the values of a lazy one, in its graph and in its memory."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, reason: str) -> torch.Tensor:
        return logits._deferred.value(reason).detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_output, None


def put_off(product: Product) -> LazyLogits:
    """The logits of ``product``, ``[..., V]`` of ``product.dtype``, in the graph of its operands and without values."""
    u, b, _ = product.low_rank or (None, None, 1.0)
    operands = (product.hidden, product.weight, product.bias, u, b)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands):
        logits: LazyLogits = _PutOff.apply(*operands, product)
        return logits
    return LazyLogits(Deferred.start(product), fusable=True)


def _fused_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy``, signature and all, as the fused loss; None where that is not the same thing."""
    if not isinstance(input, LazyLogits) or not _may_fuse(input, target, weight):
        return None
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    labels = ordinary(target)
    deferred, product = input._deferred, input._deferred.product
    product.check_current()
    epilogue = deferred.epilogue()
    if sum(name == "tanh" for name, _ in epilogue) > 1:
        return None
    if torch.is_autocast_enabled(input.device.type) and input.dtype not in (torch.float32, torch.float64):
        epilogue.append(("cast", torch.float32))  # autocast computes log_softmax and nll_loss in float32
    statistics = deferred.room_for_readers()
    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        hidden, head, bias = product.operands()
        low_rank = product.adapter(deferred.rows)
        loss = product.loss(
            deferred.rows(hidden),
            head,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            class_weight=weight,
            epilogue=tuple(epilogue),
            chunk_bytes=product.chunk_bytes,
            **_rows_of_interest(statistics, target, ignore_index),
            **({} if low_rank is None else {"low_rank": low_rank}),
        )
    product.loss_taken = True
    if statistics is not None:
        product.statistics = statistics
    return product.calls.serve(loss)


def _rows_of_interest(statistics: RowStatistics | None, target: torch.Tensor, ignore_index: int) -> dict[str, Any]:
    """Where somebody is expected to read of every row, what he reads; else how many rows the loss needs at most."""
    if statistics is not None:
        return {"statistics": statistics}
    return {"max_valid": max_valid(target, ignore_index)}


def _may_fuse(logits: LazyLogits, target: object, weight: torch.Tensor | None) -> bool:
    deferred = logits._deferred
    if not (deferred.product.open and logits._fusable and logits.ndim == 2 and not deferred.is_real):
        return False
    if not isinstance(target, torch.Tensor) or not plain(ordinary(target)) or target.dtype is not torch.int64:
        return False
    if target.shape != logits.shape[:1] or target.device != logits.device:
        return False
    return weight is None or (plain(weight) and weight.dtype is logits.dtype and not weight.requires_grad)


def _argmax(deferred: Deferred, dim: int | None = None, keepdim: bool = False) -> torch.Tensor | None:
    if dim not in (-1, deferred.meta.ndim - 1) or deferred.meta.numel() == 0:
        return None
    found = deferred.argmax()
    return found.unsqueeze(-1) if keepdim else found


def _derived(logits: LazyLogits, step: Step | list[Step]) -> LazyLogits | list[LazyLogits]:
    fusable = _stays_fusable(logits)
    if isinstance(step, list):
        return [LazyLogits(logits._deferred.after(one), fusable) for one in step]
    return LazyLogits(logits._deferred.after(step), fusable)


def _stays_fusable(logits: LazyLogits) -> bool:
    """False inside a custom Function's forward: its result gets that Function's history, not the recorded steps."""
    return logits._fusable and (torch.is_grad_enabled() or not logits.requires_grad)


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on the values of its lazy arguments. Below autograd, which has recorded ``func`` already."""
    reason = f"logits were read by {func._schema.name.rpartition('::')[2].strip('_')}"
    owners: dict[int, LazyLogits] = {}

    def value(logits: LazyLogits) -> torch.Tensor:
        real = logits._deferred.value(reason)
        owners[id(real)] = logits
        return real

    result = func(*tree_map_only(LazyLogits, value, args), **tree_map_only(LazyLogits, value, kwargs))
    return tree_map_only(torch.Tensor, lambda tensor: owners.get(id(tensor), tensor), result)


def _ordinary(argument: Any, func: Any) -> Any:
    if not isinstance(argument, LazyLogits):
        return argument
    reason = f"logits were read by {getattr(func, '__name__', func)}"
    detach = func is _GET_DATA or not argument.requires_grad
    return argument._deferred.value(reason).detach() if detach else _Ordinary.apply(argument, reason)


def _prepare_for_hook(logits: LazyLogits, *hook: Any) -> None:
    """Makes sure that a hook, or ``.grad``, gets the gradient of the logits: nothing is fused any more.

    Engines put hooks on whatever a module returns, to learn that the backward has come to it. They do not ask for the
    gradient, and where the logits are not used the loss beside them tells the engine the same.
    """
    product = logits._deferred.product
    if any(_module_of(function).startswith(_ENGINES) for function in hook):
        return
    if product.loss_taken and not logits._deferred.is_real:
        raise StaleLogitsError(
            "A hook or retain_grad asks for the gradient of the model's logits, and there is none: under "
            "use_fast_kernels the loss was computed without them. Set use_fast_kernels: {keep_logits: true}, which "
            "computes the loss from logits, as without slothplug."
        )
    logits._deferred.value("a hook was put on the logits")


def _module_of(function: Any) -> str:
    return getattr(getattr(function, "func", function), "__module__", None) or ""
