"""Matrix products of 16-bit operands whose results, or sums of results, stay in float32.

cuBLAS accumulates in float32 whatever it returns; torch can ask for the accumulator itself (``out_dtype``) on CUDA, for
``mm`` since torch 2.8 and for ``addmm`` onto a float32 tensor later. Elsewhere the same sums are made from casts.

Every product here is an in-place, ``out=`` or ``out_dtype`` call: autocast does not change those.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

# Where addmm cannot add to float32, this many rows are taken at a time: 134 MB of scratch at 4096 columns.
_ROWS = 8192


@functools.cache
def can_widen(device_type: str, dtype: torch.dtype = torch.bfloat16, operation: Literal["mm", "addmm"] = "mm") -> bool:
    """True where ``torch.mm`` (or ``addmm``) of ``dtype`` operands takes ``out_dtype=torch.float32``; tries it once."""
    operand = torch.zeros(16, 16, dtype=dtype, device=device_type)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device_type)
    try:
        if operation == "mm":
            torch.mm(operand, operand, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise  # says nothing about the product
    except (RuntimeError, TypeError):
        return False
    return True


def dense_rows(left: torch.Tensor) -> torch.Tensor:
    """``left`` [M, K], copied where it is a column view on a CPU: ready to be the left operand of a product.

    oneDNN's AMX product of 16-bit operands rounds K up and multiplies the elements after each row of the left operand
    by 0. Where they are nan or inf, the row of the result is nan.
    """
    if left.device.type == "cpu" and left.stride(0) > left.shape[1] and left.stride(1) == 1:
        return left.contiguous()
    return left


def matmul(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype | None = None, scaling: float = 1.0
) -> torch.Tensor:
    """``scaling * left @ right``, a new tensor.

    Args:
        left: [M, K], any strides.
        right: [K, N] of left's dtype, any strides.
        dtype: the result's dtype; None stands for the operands'. Float32 is returned without an intermediate rounding
            where ``can_widen`` says so, and after a rounding to the operands' dtype elsewhere.
        scaling: multiplies the float32 sum before it is rounded.
    """
    left = dense_rows(left)
    if dtype is torch.float32 and left.dtype is not dtype and can_widen(left.device.type, left.dtype):
        wide = torch.mm(left, right, out_dtype=dtype)
        return wide if scaling == 1.0 else wide.mul_(scaling)
    out = left.new_empty((left.shape[0], right.shape[1]))
    matmul_out(left, right, out, scaling)
    return out if dtype is None else out.to(dtype)


def matmul_out(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scaling: float = 1.0) -> None:
    """``out = scaling * left @ right``, rounded once; an ``out`` wider than the operands needs ``can_widen``.

    The elements between the rows of ``left`` must be finite; see ``dense_rows``.
    """
    if out.dtype != left.dtype:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if scaling != 1.0:
            out *= scaling
    elif scaling == 1.0:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(out, left, right, beta=0, alpha=scaling, out=out)


def accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """``total += left @ right``, for the ``first`` ``total = left @ right``; no sum is rounded below total's dtype."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif can_widen(left.device.type, left.dtype, "addmm"):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        _accumulate_by_rows(total, left, right, first)


def _accumulate_by_rows(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """``accumulate`` where addmm cannot: some rows of ``total`` at a time, so that the scratch stays small."""
    widens = can_widen(left.device.type, left.dtype)
    right = right if widens else right.to(total.dtype)
    for block, part in zip(total.split(_ROWS), left.split(_ROWS), strict=True):
        if not widens:
            torch.addmm(block, part.to(total.dtype), right, beta=0 if first else 1, out=block)
        elif first:
            torch.mm(part, right, out_dtype=total.dtype, out=block)
        else:
            block += torch.mm(part, right, out_dtype=total.dtype)
