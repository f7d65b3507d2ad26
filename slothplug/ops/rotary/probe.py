"""The probe of a rotary site: the kernel against every function that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from slothplug.ops.rotary.arrangement import Form, call_kernel
from slothplug.ops.rotary.forward import Exchange
from slothplug.ops.rotary.recognition import PROBE_BATCH, PROBE_HEAD, call, probe_tensors
from slothplug.patching.proof import difference
from slothplug.patching.sites import Kernel, Refusal


def prove(exchanged: Exchange, kernel: Kernel, device: torch.device, run_dtype: torch.dtype) -> Refusal | None:
    """Compares the kernel with each exchanged function: outputs and gradients, whole and partial heads, tables for all
    rows and one a row, in float32 and in the module's dtype with tables in either."""
    dtypes = dict.fromkeys(((torch.float32, torch.float32), (run_dtype, torch.float32), (run_dtype, run_dtype)))
    for function, recognised in exchanged.functions:
        widths = (PROBE_HEAD, PROBE_HEAD // 2) if recognised.partial else (PROBE_HEAD,)
        for ((_, _, unsqueeze_dim), form), (dtype, table_dtype), width in itertools.product(
            recognised.forms.items(), dtypes, widths
        ):
            for batch in (1, PROBE_BATCH) if form.table_ndim == 3 else (1,):
                signature, style = recognised.signature, recognised.style
                cos, sin, tensors = probe_tensors(signature, form, width, style.table, batch, device, dtype)
                tables = (cos.to(table_dtype), sin.to(table_dtype))
                original = partial(call, function, signature, unsqueeze_dim, *tables)
                candidate = partial(_candidate, kernel.function, form, *tables, asdict(style))
                if refusal := difference(candidate, original, tensors, []):
                    return refusal.within(
                        f"{function.__name__} with q in {dtype}, tables in {table_dtype}, {width} of {PROBE_HEAD} "
                        f"elements rotated"
                    )
    return None


def _candidate(
    kernel: Callable[..., Any],
    form: Form,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    return [output for output in call_kernel(kernel, form, q, k, cos, sin, style) if output is not None]
