"""Matrix products of 16-bit operands whose results, or sums of results, stay in float32."""

from __future__ import annotations

import functools
from typing import Literal

import torch

# Where a product cannot be added to float32, this many rows are taken at a time: 134 MB of scratch at 4096 columns.
_ROWS = 8192


@functools.cache
def returns_float32(product: Literal["mm", "addmm"], device: torch.device, dtype: torch.dtype) -> bool:
    """True where the product takes ``out_dtype``: on CUDA mm since torch 2.8, addmm onto a float32 tensor later."""
    operand = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        if product == "mm":
            torch.mm(operand, operand, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise  # says nothing about the product
    except (RuntimeError, TypeError):
        return False
    return True


def dense_rows(left: torch.Tensor) -> torch.Tensor:
    """``left``, copied where it is a view whose rows lie apart on a CPU.

    oneDNN's AMX product of 16-bit operands rounds the length of the left operand's rows up, and multiplies what lies
    behind a row by 0: nan, where that is nan or inf.
    """
    if left.device.type == "cpu" and left.stride(0) > left.shape[1] and left.stride(1) == 1:
        return left.contiguous()
    return left


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scaling: float = 1.0) -> None:
    """``out = scaling * a @ b``, rounded once."""
    if out.dtype != a.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
        if scaling != 1.0:
            out *= scaling
    elif scaling == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scaling, out=out)


def accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """``total += a @ b``, for the ``first`` ``total = a @ b``; nothing is rounded to less than total's dtype."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif returns_float32("addmm", a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        _accumulate_by_rows(total, a, b, first)


def _accumulate_by_rows(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """The same where addmm cannot: some rows of ``total`` at a time, so that the scratch stays far below its size."""
    native = returns_float32("mm", a.device, a.dtype)
    b = b if native else b.to(total.dtype)
    for block, part in zip(total.split(_ROWS), a.split(_ROWS), strict=True):
        if not native:
            torch.addmm(block, part.to(total.dtype), b, beta=0 if first else 1, out=block)
        elif first:
            torch.mm(part, b, out_dtype=total.dtype, out=block)
        else:
            block += torch.mm(part, b, out_dtype=total.dtype)
