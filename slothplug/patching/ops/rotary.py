"""Rotary embedding sites: modules whose forward calls a function of its module that rotates by the tables cos and sin.

The function is recognised by its signature and its numbers, and exchanged in a copy of the forward's closure chain
(``patching.closures``); no module global is touched. Looked into is ``forward`` with its decorators: rotary functions
that other methods or functions call are not exchanged.

That the exchanged function is called is known from the bytecode of the forward, and seen in the site's counters: in a
layer without positions (every fourth one of Cohere 2) the call is never reached, and the site counts none.

A kernel that a plugin offers for the operation ``rotary`` is called as ``kernels.rotary.rotary``, without ``backend``:

    kernel(q, k, cos, sin, *, pairing, output, table, rotate_last, promote) -> (q rotated, k rotated)

with q [B, Hq, T, D], k [B, Hk, T, D] or None, cos and sin [B or 1, T, R or R/2], of any strides.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.backend import choose_backend, why_not_triton
from slothplug.kernels.rotary import Output, Pairing, Table, rotary
from slothplug.patching.closures import chain, global_names, rebuild
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import difference, preserved_rng
from slothplug.patching.recording import why_recorded
from slothplug.patching.sites import Kernel, Left, Operation, Served, Site, device_of, dtype_of, plain
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "rotary"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROBE_BATCH, PROBE_HEADS, PROBE_KV_HEADS, PROBE_TOKENS, PROBE_HEAD = 2, 4, 3, 5, 16


@dataclass(frozen=True)
class Variant:
    """Which elements make pairs and how the tables serve them; the arguments of ``kernels.rotary``."""

    pairing: Pairing
    output: Output
    table: Table
    rotate_last: bool
    promote: bool


class Form(NamedTuple):
    """An arrangement of arguments. ``heads_first``: q is [.., H, T, D]; otherwise [.., T, H, D].

    With 3 dimensions q has no batch; with 2 the tables have none, and are broadcast.
    """

    q_ndim: int
    table_ndim: int
    heads_first: bool


FORMS = (
    Form(4, 3, heads_first=True),
    Form(4, 3, heads_first=False),
    Form(4, 2, heads_first=True),
    Form(4, 2, heads_first=False),
    Form(3, 2, heads_first=False),
)


@dataclass(frozen=True)
class Signature:
    """The arguments of a rotary function. ``tensors`` are the names of q and k, or of the one tensor it rotates."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    unsqueeze_dim: int | None
    """Default of the parameter of that name; None where there is none."""


@dataclass(frozen=True)
class Rotation:
    """What a rotary function was recognised as.

    Attributes:
        forms: the arrangement for each (q.ndim, cos.ndim, unsqueeze_dim) with which the function was reproduced.
        partial: it rotates R < D elements of a head and hands the others on.
    """

    signature: Signature
    variant: Variant
    forms: dict[tuple[int, int, int | None], Form]
    partial: bool


@dataclass(frozen=True)
class Exchange:
    """A forward with its rotary functions exchanged, and what was recognised in it."""

    forward: Callable[..., Any]
    rotations: tuple[tuple[FunctionType, Rotation], ...]


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [Operation(NAME, "Rotary position embedding of q and k in one pass, forward and backward")]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    backend = choose_backend(device) if settings.backend == "auto" else settings.backend
    if backend == "triton" and why_not_triton(device):
        return None
    return Kernel(NAME, backend, partial(rotary, backend=backend))


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    # Not kept from patch to patch: a rebuilt forward holds its module's globals as they are now.
    exchanged: dict[Callable[..., Any], Exchange | str | None] = {}
    for name, module in model.named_modules():
        forward = stock_class(module).forward
        if forward not in exchanged:
            exchanged[forward] = exchange(forward)
        outcome = exchanged[forward]
        if outcome is None:
            continue
        device, dtype = device_of(module), dtype_of(module)
        kernel = kernel_for(NAME, device, dtype, settings)
        if isinstance(outcome, str):
            yield Left(NAME, name, module, outcome, excused=_is_latent_attention(module))
        elif device.type == "meta":
            yield Left(NAME, name, module, "its weights are on the meta device")
        elif kernel is None:
            yield Left(NAME, name, module, f"no kernel for {device.type} and {dtype}")
        else:
            proof = partial(prove, outcome, kernel, device, dtype)
            functions = tuple(function for function, _ in outcome.rotations)
            yield Site(NAME, name, module, fast_rotary, outcome, kernel, proof, (functions, dtype))


def _is_latent_attention(module: nn.Module) -> bool:
    return hasattr(module, "kv_lora_rank")


class _Announced(threading.local):
    """The served module whose forward is running on this thread."""

    served: Served | None = None


_announced = _Announced()


def fast_rotary(module: nn.Module, served: Served, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the module's forward: runs the rebuilt one, in which rotary functions ask for ``served``."""
    if reason := why_recorded():
        return served.fall_back(module, reason, *args, **kwargs)
    outer, _announced.served = _announced.served, served
    try:
        return served.params.forward(module, *args, **kwargs)
    finally:
        _announced.served = outer


def exchange(forward: Callable[..., Any]) -> Exchange | str | None:
    """``forward`` with every recognised rotary function exchanged.

    Returns:
        None where no rotary function is called; a reason where those that are were not recognised.
    """
    rotations, reasons = [], []
    rebuilt = forward
    for name, function in rotary_functions(forward):
        rotation = identify(function)
        if isinstance(rotation, str):
            reasons.append(f"{name} {rotation}")
            replacement = _counted(function, rotation)
        else:
            rotations.append((function, rotation))
            replacement = _replacement(function, rotation)
        replaced = rebuild(rebuilt, name, replacement)
        assert replaced is not None  # the name was found in the chain that is rebuilt
        rebuilt = replaced
    if rotations:
        return Exchange(rebuilt, tuple(rotations))
    return "; ".join(reasons) or None


def rotary_functions(forward: Callable[..., Any]) -> Iterator[tuple[str, FunctionType]]:
    """The rotary functions that the chain of ``forward`` reads from its modules, by name.

    They have parameters cos and sin. Others are taken along by what they are called, so that they are reported.
    """
    found: dict[str, FunctionType] = {}
    for link in chain(forward):
        for name in global_names(link):
            value = link.__globals__.get(name)
            if isinstance(value, FunctionType) and (_has_tables(value) or name.startswith("apply_rotary")):
                found[name] = value
    yield from sorted(found.items())


def _has_tables(function: FunctionType) -> bool:
    return {"cos", "sin"} <= set(inspect.signature(function).parameters)


def _replacement(function: FunctionType, rotation: Rotation) -> Callable[..., Any]:
    """What is called instead of ``function``: the announced module's kernel, or ``function`` itself."""
    names, tensors, default = rotation.signature.names, rotation.signature.tensors, rotation.signature.unsqueeze_dim
    variant = asdict(rotation.variant)
    pair = len(tensors) == 2

    @functools.wraps(function)
    def fast(*args: Any, **kwargs: Any) -> Any:
        served = _announced.served
        if served is None:
            return function(*args, **kwargs)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        if len(given) != len(args) + len(kwargs):  # an argument too many, or one given twice
            return function(*args, **kwargs)
        q, cos, sin = given.pop(tensors[0], None), given.pop("cos", None), given.pop("sin", None)
        k = given.pop(tensors[1], None) if pair else None
        unsqueeze_dim = given.pop("unsqueeze_dim", default)
        reason = _why_not(q, k, cos, sin, pair, given, served.device_type)
        form = None if reason else rotation.forms.get((q.ndim, cos.ndim, unsqueeze_dim))
        if reason is None and (form is None or not _fits(form, q, k, cos, sin, rotation)):
            reason = "q, k and tables are arranged in another way than was proved"
        if reason is not None or form is None:
            served.calls.fallbacks[f"{function.__name__}: {reason}"] += 1
            return function(*args, **kwargs)
        q_out, k_out = _arranged(served.kernel, form, q, k, cos, sin, variant)
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


def _why_not(q: Any, k: Any, cos: Any, sin: Any, pair: bool, others: dict[str, Any], device_type: str) -> str | None:
    if any(value is not None for value in others.values()):
        return f"called with {', '.join(others)}"
    if not plain(q) or not plain(cos) or not plain(sin) or (pair and not plain(k)):
        return "called with something else than plain tensors"
    if q.dtype not in DTYPES or cos.dtype not in DTYPES:
        return f"q in {q.dtype}, tables in {cos.dtype}"
    if sin.dtype is not cos.dtype or (pair and k.dtype is not q.dtype):
        return "q and k, or cos and sin, differ in dtype"
    if q.device.type != device_type or cos.device != q.device or sin.device != q.device:
        return f"tensors on {q.device}, patched for {device_type}"
    if cos.requires_grad or sin.requires_grad:
        return "the tables require gradients"
    return None


def _fits(
    form: Form, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation
) -> bool:
    """Whether the shapes are those of ``form``: equal batches and lengths, and heads as wide as the tables or wider."""
    tokens = -2 if form.heads_first else -3
    width = cos.shape[-1] * (2 if rotation.variant.table == "single" else 1)
    if cos.shape != sin.shape or cos.shape[-2] != q.shape[tokens] or width % 2 or width > q.shape[-1]:
        return False
    if width < q.shape[-1] and not rotation.partial:
        return False
    if form.table_ndim == 3 and cos.shape[0] not in (1, q.shape[0]):
        return False
    if k is None:
        return True
    heads = -3 if form.heads_first else -2
    return k.ndim == q.ndim and all(k.shape[dim] == q.shape[dim] for dim in range(-q.ndim, 0) if dim != heads)


def _arranged(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    variant: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls the kernel with views as it wants them, [B, H, T, D] and [B or 1, T, R], and turns its outputs back."""
    if form == FORMS[0]:
        return kernel(q, k, cos, sin, **variant)
    if form.table_ndim == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    q_out, k_out = kernel(_to_kernel(q, form), None if k is None else _to_kernel(k, form), cos, sin, **variant)
    return _from_kernel(q_out, form), None if k_out is None else _from_kernel(k_out, form)


def _to_kernel(x: torch.Tensor, form: Form) -> torch.Tensor:
    x = x if form.q_ndim == 4 else x.unsqueeze(0)
    return x if form.heads_first else x.transpose(1, 2)


def _from_kernel(x: torch.Tensor, form: Form) -> torch.Tensor:
    x = x if form.heads_first else x.transpose(1, 2)
    return x if form.q_ndim == 4 else x.squeeze(0)


@functools.cache
def identify(function: FunctionType) -> Rotation | str:
    """What ``function`` computes, found by calls with small random tensors; a reason where it is no known rotation."""
    signature = _signature(function)
    if isinstance(signature, str):
        return signature
    with preserved_rng(), torch.no_grad():
        found = [rotation for variant in _variants() if (rotation := _as(function, signature, variant))]
    # Where whole heads are rotated, the first and the last R elements are the same ones.
    found.sort(key=lambda rotation: not rotation.partial)
    return found[0] if found else "computes something else than the known rotations"


def _as(function: FunctionType, signature: Signature, variant: Variant) -> Rotation | None:
    """``function`` as ``variant``, in every arrangement in which that reproduces it; None where in none."""
    forms = {
        key: form
        for key, form in _form_keys(signature)
        if _reproduces(function, signature, variant, form, key[2], PROBE_HEAD)
    }
    partial_heads = [
        _reproduces(function, signature, variant, form, key[2], PROBE_HEAD // 2) for key, form in forms.items()
    ]
    return Rotation(signature, variant, forms, all(partial_heads)) if forms else None


def _signature(function: FunctionType) -> Signature | str:
    parameters = inspect.signature(function).parameters
    names = tuple(p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    tensors = tuple(itertools.takewhile(lambda name: name not in ("cos", "sin"), names))
    known = (*tensors, "cos", "sin", "unsqueeze_dim")
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty and name not in known]
    if not _has_tables(function) or len(tensors) not in (1, 2) or required:
        return f"takes ({', '.join(parameters)}), not q and k, or one tensor, and their tables cos and sin"
    unsqueeze_dim = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
    return Signature(names, tensors, unsqueeze_dim)


def _form_keys(signature: Signature) -> Iterator[tuple[tuple[int, int, int | None], Form]]:
    """Every way to call the function, and the arrangement that it stands for."""
    if signature.unsqueeze_dim is None:
        for form in FORMS:
            yield (form.q_ndim, form.table_ndim, None), form
        return
    for form in FORMS[:2]:
        yield (form.q_ndim, form.table_ndim, 1 if form.heads_first else 2), form


def _variants() -> Iterator[Variant]:
    tables: tuple[Table, ...] = ("cat", "single", "repeat", "halves")
    for table, rotate_last, promote in itertools.product(tables, (False, True), (True, False)):
        if table in ("cat", "single"):
            yield Variant("half", "same", table, rotate_last, promote)
        yield Variant("interleaved", "same", table, rotate_last, promote)
        yield Variant("interleaved", "half", table, rotate_last, promote)


def _call(
    function: Callable[..., Any],
    signature: Signature,
    unsqueeze_dim: int | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    arguments: dict[str, Any] = {**dict(zip(signature.tensors, tensors, strict=True)), "cos": cos, "sin": sin}
    if unsqueeze_dim is not None:
        arguments["unsqueeze_dim"] = unsqueeze_dim
    outputs = function(**arguments)
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _probe(
    signature: Signature, form: Form, width: int, table: Table, batch: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Random cos and sin in float32, and tensors to rotate. The tables' halves differ, to show which entry is read."""
    rows = (PROBE_TOKENS, width // 2 if table == "single" else width)
    shape = rows if form.table_ndim == 2 else (batch, *rows)
    cos, sin = torch.randn(shape, device=device), torch.randn(shape, device=device)
    tensors = []
    for heads in (PROBE_HEADS, PROBE_KV_HEADS)[: len(signature.tensors)]:
        inner = (heads, PROBE_TOKENS) if form.heads_first else (PROBE_TOKENS, heads)
        x = torch.randn(*((PROBE_BATCH,) if form.q_ndim == 4 else ()), *inner, PROBE_HEAD, device=device)
        tensors.append(x.to(dtype).requires_grad_())
    return cos, sin, tensors


def _reproduces(
    function: FunctionType, signature: Signature, variant: Variant, form: Form, unsqueeze_dim: int | None, width: int
) -> bool:
    """Whether ``variant`` gives the function's numbers in float32, and its dtypes from bfloat16 with float32 tables."""
    arguments = asdict(variant)
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin, tensors = _probe(signature, form, width, variant.table, PROBE_BATCH, torch.device("cpu"), dtype)
        try:
            expected = _call(function, signature, unsqueeze_dim, cos, sin, *tensors)
        except Exception:  # the function does not take tables of this width, or tensors in this arrangement
            return False
        q, k = (*tensors, None)[:2]
        assert q is not None
        got = _arranged(partial(rotary, backend="torch"), form, q, k, cos, sin, arguments)
        for ours, theirs in zip(got, (*expected, None), strict=False):
            if ours is None and theirs is None:
                continue
            if ours is None or not isinstance(theirs, torch.Tensor):
                return False
            if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
                return False
            if dtype is torch.float32 and not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
                return False
    return True


def prove(exchanged: Exchange, kernel: Kernel, device: torch.device, run_dtype: torch.dtype) -> str | None:
    """Compares the kernel with each exchanged function: outputs and gradients, whole and partial heads, tables for all
    rows and one a row, in float32 and in the module's dtype with tables in either."""
    dtypes = dict.fromkeys(((torch.float32, torch.float32), (run_dtype, torch.float32), (run_dtype, run_dtype)))
    for function, rotation in exchanged.rotations:
        widths = (PROBE_HEAD, PROBE_HEAD // 2) if rotation.partial else (PROBE_HEAD,)
        for ((_, _, unsqueeze_dim), form), (dtype, table_dtype), width in itertools.product(
            rotation.forms.items(), dtypes, widths
        ):
            for batch in (1, PROBE_BATCH) if form.table_ndim == 3 else (1,):
                signature, variant = rotation.signature, rotation.variant
                cos, sin, tensors = _probe(signature, form, width, variant.table, batch, device, dtype)
                tables = (cos.to(table_dtype), sin.to(table_dtype))
                original = partial(_call, function, signature, unsqueeze_dim, *tables)
                candidate = partial(_candidate, kernel.function, form, *tables, asdict(variant))
                if reason := difference(candidate, original, tensors, []):
                    return (
                        f"{function.__name__} with q in {dtype}, tables in {table_dtype}, {width} of {PROBE_HEAD} "
                        f"elements rotated: {reason}"
                    )
    return None


def _candidate(
    kernel: Callable[..., Any],
    form: Form,
    cos: torch.Tensor,
    sin: torch.Tensor,
    variant: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    return [output for output in _arranged(kernel, form, q, k, cos, sin, variant) if output is not None]
