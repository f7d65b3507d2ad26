"""``LazyTensor``: a ``torch.Tensor`` whose values are computed when they are read.

It has the shape, dtype, device and autograd history of the tensor that it stands for. Autograd runs above it and
records every operation as on any tensor: only values are put off. So hooks, custom autograd Functions, views, in-place
writes and DDP's search for unused parameters see what they would see in stock. A subclass says which operations need no
values; every other operation computes them, once, and goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from slothplug.errors import StaleLogitsError
from slothplug.ops.head.lazy_value import LazyValue

aten = torch.ops.aten

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
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
"""Functions that look at a tensor's memory or Python state and so need an ordinary tensor."""
_ENGINES = ("torch.distributed.", "deepspeed.")
_HOOKS: frozenset[Any] = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad})


class LazyTensor(torch.Tensor):
    """A tensor with the value ``_value``."""

    _value: LazyValue

    @classmethod
    def _make(cls, value: LazyValue) -> Self:
        meta = value.meta
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=value.call.hidden.device,
        )
        self._value = value
        return self

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func(self, *args, **kwargs)`` gives without the values; None where it needs them."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEED_MEMORY:
            return func(*(_computed(arg, func) for arg in args), **kwargs)
        if func in _HOOKS:
            _prepare_for_hook(args[0], *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.mul.Tensor and not isinstance(args[0], LazyTensor):
            args = args[::-1]
        if isinstance(args[0], LazyTensor):
            result = args[0]._record(func, args[1:], kwargs)
            if result is not None:
                return result
        return _with_values(func, args, kwargs)


class _Computed(torch.autograd.Function):
    """An ordinary tensor with the values of a lazy one, in its graph and in its memory."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyTensor, reason: str) -> torch.Tensor:
        return lazy._value.read(reason).detach()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_output, None


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on the values of its lazy arguments. Below autograd, which has recorded ``func`` already."""
    reason = f"logits were read by {func._schema.name.rpartition('::')[2].strip('_')}"
    owners: dict[int, LazyTensor] = {}

    def read(lazy: LazyTensor) -> torch.Tensor:
        computed = lazy._value.read(reason)
        owners[id(computed)] = lazy
        return computed

    result = func(*tree_map_only(LazyTensor, read, args), **tree_map_only(LazyTensor, read, kwargs))
    return tree_map_only(torch.Tensor, lambda tensor: owners.get(id(tensor), tensor), result)


def _computed(argument: Any, func: Any) -> Any:
    """An ordinary tensor for a lazy one; any other argument as it is."""
    if not isinstance(argument, LazyTensor):
        return argument
    reason = f"logits were read by {getattr(func, '__name__', func)}"
    detach = func is _GET_DATA or not argument.requires_grad
    return argument._value.read(reason).detach() if detach else _Computed.apply(argument, reason)


def _prepare_for_hook(lazy: LazyTensor, *hook: Any) -> None:
    """Makes sure that a hook, or ``.grad``, gets the gradient of the logits: nothing is fused any more.

    Engines put hooks on whatever a module returns, to learn that the backward has reached it. They do not ask for the
    gradient, and where the logits are not used the loss beside them tells the engine the same.
    """
    if any(_module_of(function).startswith(_ENGINES) for function in hook):
        return
    if lazy._value.call.loss_taken and not lazy._value.is_computed:
        raise StaleLogitsError(
            "A hook or retain_grad asks for the gradient of the model's logits, and there is none: under "
            "use_fast_kernels the loss was computed without them. Set use_fast_kernels: {keep_logits: true}, which "
            "computes the loss from logits, as without slothplug."
        )
    lazy._value.read("a hook was put on the logits")


def _module_of(function: Any) -> str:
    return getattr(getattr(function, "func", function), "__module__", None) or ""
