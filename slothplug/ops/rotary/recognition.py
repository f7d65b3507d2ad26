"""What a rotary function computes, found by calls of it with small random tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from slothplug.kernels.rotary import Output, Pairing, Table, rotary
from slothplug.ops.rotary.arrangement import FORMS, Form, call_kernel
from slothplug.patching.precision import preserved_rng
from slothplug.patching.sites import Refusal

PROBE_BATCH, PROBE_HEADS, PROBE_KV_HEADS, PROBE_TOKENS, PROBE_HEAD = 2, 4, 3, 5, 16


@dataclass(frozen=True)
class RotaryStyle:
    """Which elements make pairs and how the tables serve them; the arguments of ``kernels.rotary``."""

    pairing: Pairing
    output: Output
    table: Table
    rotate_last: bool
    promote: bool


@dataclass(frozen=True)
class Signature:
    """The arguments of a rotary function. ``tensors`` are the names of q and k, or of the one tensor it rotates."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    unsqueeze_dim: int | None
    """Default of the parameter of that name; None where there is none."""


@dataclass(frozen=True)
class RotaryFunction:
    """What a rotary function was recognised as.

    Attributes:
        forms: the arrangement for each (q.ndim, cos.ndim, unsqueeze_dim) with which the function was reproduced.
        partial: it rotates R < D elements of a head and hands the others on.
    """

    signature: Signature
    style: RotaryStyle
    forms: dict[tuple[int, int, int | None], Form]
    partial: bool


@functools.cache
def identify(function: FunctionType) -> RotaryFunction | Refusal:
    """What ``function`` computes; a refusal where it is no known rotation."""
    signature = _signature(function)
    if isinstance(signature, Refusal):
        return signature
    with preserved_rng(), torch.no_grad():
        found = [recognised for style in _styles() if (recognised := _as(function, signature, style))]
    # Where whole heads are rotated, the first and the last R elements are the same ones.
    found.sort(key=lambda recognised: not recognised.partial)
    return found[0] if found else Refusal("computes something else than the known rotations")


def _as(function: FunctionType, signature: Signature, style: RotaryStyle) -> RotaryFunction | None:
    """``function`` as ``style``, in every arrangement in which that reproduces it; None where in none."""
    forms = {
        key: form
        for key, form in _form_keys(signature)
        if _reproduces(function, signature, style, form, key[2], PROBE_HEAD)
    }
    partial_heads = [
        _reproduces(function, signature, style, form, key[2], PROBE_HEAD // 2) for key, form in forms.items()
    ]
    return RotaryFunction(signature, style, forms, all(partial_heads)) if forms else None


def has_tables(function: FunctionType) -> bool:
    return {"cos", "sin"} <= set(inspect.signature(function).parameters)


def _signature(function: FunctionType) -> Signature | Refusal:
    parameters = inspect.signature(function).parameters
    names = tuple(p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    tensors = tuple(itertools.takewhile(lambda name: name not in ("cos", "sin"), names))
    known = (*tensors, "cos", "sin", "unsqueeze_dim")
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty and name not in known]
    if not has_tables(function) or len(tensors) not in (1, 2) or required:
        return Refusal(f"takes ({', '.join(parameters)}), not q and k, or one tensor, and their tables cos and sin")
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


def _styles() -> Iterator[RotaryStyle]:
    tables: tuple[Table, ...] = ("cat", "single", "repeat", "halves")
    for table, rotate_last, promote in itertools.product(tables, (False, True), (True, False)):
        if table in ("cat", "single"):
            yield RotaryStyle("half", "same", table, rotate_last, promote)
        yield RotaryStyle("interleaved", "same", table, rotate_last, promote)
        yield RotaryStyle("interleaved", "half", table, rotate_last, promote)


def _reproduces(
    function: FunctionType, signature: Signature, style: RotaryStyle, form: Form, unsqueeze_dim: int | None, width: int
) -> bool:
    """Whether ``style`` gives the function's numbers in float32, and its dtypes from bfloat16 with float32 tables."""
    arguments = asdict(style)
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin, tensors = probe_tensors(signature, form, width, style.table, PROBE_BATCH, torch.device("cpu"), dtype)
        try:
            expected = call(function, signature, unsqueeze_dim, cos, sin, *tensors)
        except Exception:  # the function does not take tables of this width, or tensors in this arrangement
            return False
        q, k = (*tensors, None)[:2]
        assert q is not None
        got = call_kernel(partial(rotary, backend="torch"), form, q, k, cos, sin, arguments)
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


def call(
    function: Callable[..., Any],
    signature: Signature,
    unsqueeze_dim: int | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What ``function`` returns for these tables and tensors, as a tuple."""
    arguments: dict[str, Any] = {**dict(zip(signature.tensors, tensors, strict=True)), "cos": cos, "sin": sin}
    if unsqueeze_dim is not None:
        arguments["unsqueeze_dim"] = unsqueeze_dim
    outputs = function(**arguments)
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def probe_tensors(
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
