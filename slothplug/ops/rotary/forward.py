"""The fast forward: a copy of the module's own in which the rotary functions that it calls are exchanged."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from slothplug.kernels.rotary import DTYPES
from slothplug.ops.rotary.arrangement import Form, call_kernel
from slothplug.ops.rotary.recognition import RotaryFunction, has_tables, identify
from slothplug.patching.forward_context import facts_of
from slothplug.patching.predicates import plain, why_not_input
from slothplug.patching.rebind_globals import chain, global_names, rebuild
from slothplug.patching.served import Served
from slothplug.patching.settled import SettledItems
from slothplug.patching.sites import Refusal
from slothplug.patching.transforms import why_not_now
from slothplug.patching.watch import UNWATCHED, Reads, Watch


@dataclass(frozen=True)
class Exchange:
    """A copy of a class's forward in which rotary functions are exchanged.

    Attributes:
        forward: the copy.
        functions: the exchanged functions and what each was recognised as.
        settled: what the copy does not read from where stock reads it: the class's forward, the globals of its closure
            chain, and all that the rotary functions read.
    """

    forward: Callable[..., Any]
    functions: tuple[tuple[FunctionType, RotaryFunction], ...]
    settled: SettledItems


class _Announced(threading.local):
    """The served module whose forward is running on this thread."""

    served: Served | None = None


_announced = _Announced()

_CHANGED = Refusal("its class's forward, or a global that it reads, was replaced after the patch")


def fast_rotary(module: nn.Module, served: Served, /, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward: runs the copy, in which rotary functions ask for ``served``."""
    exchange: Exchange = served.spec
    facts = facts_of(served)
    if facts is None:
        facts = _unchanged(exchange, UNWATCHED)
    refusal = facts if isinstance(facts, Refusal) else why_not_now()
    if refusal:
        return served.fall_back(module, refusal, *args, **kwargs)
    outer, _announced.served = _announced.served, served
    try:
        return exchange.forward(module, *args, **kwargs)
    finally:
        _announced.served = outer


def bind(module: nn.Module, served: Served, watch: Watch) -> bool | Refusal:
    """True for as long as the copied forward is the class's own and reads the same globals."""
    return _unchanged(served.spec, watch)


def _unchanged(exchange: Exchange, reads: Reads) -> bool | Refusal:
    return exchange.settled.fits(reads) or _CHANGED


def exchange_functions(owner: type[nn.Module]) -> Exchange | Refusal:
    """``owner``'s forward with every recognised rotary function exchanged; a refusal where none is recognised."""
    exchanged, reasons = [], []
    rebuilt: Callable[..., Any] = owner.forward
    for name, function in rotary_functions(owner.forward):
        recognised, reads = identify(function), SettledItems.of_function(function)
        if isinstance(recognised, RotaryFunction) and isinstance(reads, SettledItems):
            exchanged.append((function, recognised, reads))
            replacement = _replacement(function, recognised)
        else:
            reason = next(each.reason for each in (recognised, reads) if isinstance(each, Refusal))
            reasons.append(f"{name} {reason}")
            replacement = _counted(function, reason)
        replaced = rebuild(rebuilt, name, replacement)
        assert replaced is not None  # the name was found in the chain that is rebuilt
        rebuilt = replaced
    if not exchanged:
        return Refusal("; ".join(reasons))
    settled = SettledItems.of_forward(owner, chain(owner.forward))
    for _, _, reads in exchanged:
        settled += reads
    return Exchange(rebuilt, tuple((function, recognised) for function, recognised, _ in exchanged), settled)


def rotary_functions(forward: Callable[..., Any]) -> Iterator[tuple[str, FunctionType]]:
    """The rotary functions that the chain of ``forward`` reads from its modules, by name.

    They have parameters cos and sin. Others are taken along by what they are called, so that they are reported.
    """
    found: dict[str, FunctionType] = {}
    for link in chain(forward):
        for name in global_names(link):
            function = _function_of(link.__globals__.get(name))
            if function is not None and (has_tables(function) or name.startswith("apply_rotary")):
                found[name] = function
    yield from sorted(found.items())


def _function_of(value: object) -> FunctionType | None:
    """The function that a global is: itself, or the one that the package ``kernels`` made a module of.

    Where that package is installed, transformers' rotary functions are modules without state, whose forward calls the
    function, until ``use_kernels`` gives one another forward.
    """
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, nn.Module) and hasattr(value, "kernel_layer_name") and "forward" not in vars(value):
        return chain(type(value).forward)[-1]
    return None


def _replacement(function: FunctionType, recognised: RotaryFunction) -> Callable[..., Any]:
    """What is called instead of ``function``: the announced module's kernel, or ``function`` itself."""
    signature, style = recognised.signature, asdict(recognised.style)
    pair = len(signature.tensors) == 2
    in_order = signature.names[: len(signature.tensors) + 2] == (*signature.tensors, "cos", "sin")

    @functools.wraps(function)
    def fast(*args: Any, **kwargs: Any) -> Any:
        served = _announced.served
        if served is None:
            return function(*args, **kwargs)
        others: dict[str, Any] = {}
        if in_order and not kwargs and len(args) == len(signature.tensors) + 2:
            q, k, cos, sin = args if pair else (args[0], None, *args[1:])
            unsqueeze_dim = signature.unsqueeze_dim
        else:
            others = dict(zip(signature.names, args, strict=False)) | kwargs
            if len(others) != len(args) + len(kwargs):  # an argument too many, or one given twice
                return function(*args, **kwargs)
            q, cos, sin = others.pop(signature.tensors[0], None), others.pop("cos", None), others.pop("sin", None)
            k = others.pop(signature.tensors[1], None) if pair else None
            unsqueeze_dim = others.pop("unsqueeze_dim", signature.unsqueeze_dim)
        refusal = _why_not(q, k, cos, sin, pair, others, served.device_type)
        form = None if refusal else recognised.forms.get((q.ndim, cos.ndim, unsqueeze_dim))
        if form is None or not _fits(form, q, k, cos, sin, recognised):
            refusal = refusal or Refusal("q, k and tables are arranged in another way than was proved")
            served.calls.fallbacks[f"{function.__name__}: {refusal.reason}"] += 1
            return function(*args, **kwargs)
        q_out, k_out = call_kernel(served.kernel, form, q, k, cos, sin, style)
        served.calls.serve(q_out)
        return (q_out, k_out) if pair else q_out

    return fast


def _counted(function: FunctionType, reason: str) -> Callable[..., Any]:
    """``function`` itself, beside recognised ones: its calls count as fallen back, so that none goes unseen."""

    @functools.wraps(function)
    def original(*args: Any, **kwargs: Any) -> Any:
        if _announced.served is not None:
            _announced.served.calls.fallbacks[f"{function.__name__} {reason}"] += 1
        return function(*args, **kwargs)

    return original


def _why_not(
    q: Any, k: Any, cos: Any, sin: Any, pair: bool, others: dict[str, Any], device_type: str
) -> Refusal | None:
    if others and any(value is not None for value in others.values()):
        return Refusal(f"called with {', '.join(others)}")
    if reason := why_not_input(q, device_type):
        return reason
    if not plain(cos) or not plain(sin) or (pair and not plain(k)):
        return Refusal("k or the tables are no plain tensors")
    if q.dtype not in DTYPES or cos.dtype not in DTYPES:
        return Refusal(f"input of {q.dtype}, tables of {cos.dtype}")
    if sin.dtype is not cos.dtype or (pair and k.dtype is not q.dtype):
        return Refusal("q and k, or cos and sin, differ in dtype")
    device = q.device
    if cos.device != device or sin.device != device or (pair and k.device != device):
        return Refusal(f"k or the tables are on another device than q, {device}")
    if cos.requires_grad or sin.requires_grad:
        return Refusal("the tables require gradients")
    return None


def _fits(
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recognised: RotaryFunction,
) -> bool:
    """Whether the shapes are those of ``form``: equal batches and lengths, and heads as wide as the tables or wider."""
    heads, tokens = (-3, -2) if form.heads_first else (-2, -3)
    q_shape, cos_shape = q.shape, cos.shape
    width = cos_shape[-1] * (2 if recognised.style.table == "single" else 1)
    if cos_shape != sin.shape or cos_shape[-2] != q_shape[tokens] or width % 2 or width > q_shape[-1]:
        return False
    if width < q_shape[-1] and not recognised.partial:
        return False
    if form.table_ndim == 3 and cos_shape[0] not in (1, q_shape[0]):
        return False
    if k is None:
        return True
    k_shape = k.shape
    same_rank = len(k_shape) == len(q_shape)
    return same_rank and k_shape[:heads] == q_shape[:heads] and k_shape[heads + 1 :] == q_shape[heads + 1 :]
