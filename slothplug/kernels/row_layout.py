"""The rows of tensors [..., H] of any strides: their order in memory, their offsets, and new tensors of that order.

A kernel that takes rows in memory order reads a stream, also where the tensor is a transposed view such as
[B, H, T, D]. Everything here is a function of shapes and strides alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

Ints = tuple[int, ...]

# Kernels address rows by up to this many outer dimensions; tensors of more dimensions are viewed as matrices.
OUTER_DIMENSIONS = 3


class MergedRows(NamedTuple):
    """The offsets of row r in several tensors of one shape, r counted in memory order.

    Row r starts at element ``(r // size_2 // size_1) * stride_0 + (r // size_2 % size_1) * stride_1 + r % size_2 *
    stride_2``. Outer dimensions that are one stride apart in every tensor are merged, which leaves sizes of 1
    in the usual case.

    Attributes:
        rows: their number.
        sizes: (size_1, size_2).
        strides: (stride_0, stride_1, stride_2) of each tensor.
    """

    rows: int
    sizes: Ints
    strides: tuple[Ints, ...]


def row_order(strides: Ints) -> Ints:
    """The outer dimensions in the order in which memory holds them, largest stride first."""
    return tuple(sorted(range(len(strides) - 1), key=lambda dim: -strides[dim]))


def merge_rows(order: Ints, shape: Ints, *strides: Ints) -> MergedRows:
    """The rows of tensors of ``shape`` [..., H] and these strides, up to 3 outer dimensions, counted in ``order``."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim in order:
        size = shape[dim]
        if size == 1:
            continue
        if sizes and all(outer[-1] == own[dim] * size for outer, own in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for outer, own in zip(merged, strides, strict=True):
                outer[-1] = own[dim]
        else:
            sizes.append(size)
            for outer, own in zip(merged, strides, strict=True):
                outer.append(own[dim])
    missing = OUTER_DIMENSIONS - len(sizes)
    rows = 1
    for size in sizes:
        rows *= size
    inner = (*sizes[1:], *[1] * missing) if sizes else (1, 1)
    return MergedRows(rows, inner, tuple((*outer, *[0] * missing) for outer in merged))


def is_dense(order: Ints, shape: Ints, strides: Ints) -> bool:
    """True where the dimensions ``order``, in that order, fill memory without gaps."""
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def matrix_stride(shape: Ints, strides: Ints) -> int | None:
    """The row stride of a tensor [..., H] viewed as [N, H]; None where its strides allow no such view."""
    merged = merge_rows(tuple(range(len(shape) - 1)), shape, strides)
    return merged.strides[0][0] if merged.sizes == (1, 1) else None


def empty_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of x's shape, dense, whose rows lie in memory in the order of x's rows."""
    if x.is_contiguous():
        return torch.empty_like(x, dtype=dtype)
    return torch.empty_strided(x.shape, _dense_strides(x.shape, x.stride()), dtype=dtype, device=x.device)


def empty_row_values(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 tensor [...] with one value for each row of x [..., H], in the order of x's rows."""
    shape, strides = _row_values(x.shape, x.stride())
    return torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: Ints, strides: Ints) -> Ints:
    return _strides_in_order(shape, (*_order_of_new(strides), len(shape) - 1))


@functools.lru_cache(maxsize=1024)
def _row_values(shape: Ints, strides: Ints) -> tuple[Ints, Ints]:
    """Shape and strides."""
    outer = tuple(shape[:-1])
    return outer, _strides_in_order(outer, _order_of_new(strides))


def _order_of_new(strides: Ints) -> Ints:
    """The order of the rows; that of the dimensions where a kernel needs the view as a matrix."""
    outer = len(strides) - 1
    return row_order(strides) if outer <= OUTER_DIMENSIONS else tuple(range(outer))


def _strides_in_order(shape: Ints, order: Ints) -> Ints:
    strides, next_stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], next_stride = next_stride, next_stride * max(shape[dim], 1)
    return tuple(strides)
