"""How models hand q, k and their tables to a rotary function, and the views that a kernel takes them as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


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


def call_kernel(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    style: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls the kernel with views as it wants them, [B, H, T, D] and [B or 1, T, R], and turns its outputs back."""
    if form == FORMS[0]:
        return kernel(q, k, cos, sin, **style)
    if form.table_ndim == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    q_out, k_out = kernel(_to_kernel(q, form), None if k is None else _to_kernel(k, form), cos, sin, **style)
    return _from_kernel(q_out, form), None if k_out is None else _from_kernel(k_out, form)


def _to_kernel(x: torch.Tensor, form: Form) -> torch.Tensor:
    x = x if form.q_ndim == 4 else x.unsqueeze(0)
    return x if form.heads_first else x.transpose(1, 2)


def _from_kernel(x: torch.Tensor, form: Form) -> torch.Tensor:
    x = x if form.heads_first else x.transpose(1, 2)
    return x if form.q_ndim == 4 else x.squeeze(0)
