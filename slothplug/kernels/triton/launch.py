"""What every Triton launch here shares: the device a kernel runs on, and how a strided tensor is walked row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, num_warps: int, **options: Any
) -> None:
    """Starts ``kernel[grid]`` on ``device`` and its current stream, with ``num_warps`` warps of 32 threads.

    Triton launches on the *current* device. A model spread over several GPUs calls us with tensors of another one,
    and only then is the context manager paid for.
    """
    if torch.version.hip:  # wavefronts of 64 threads
        num_warps = wider_warps(num_warps, 64)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, num_warps=num_warps, **options)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, num_warps=num_warps, **options)


def wider_warps(num_warps: int, width: int) -> int:
    """How many warps of ``width`` threads have the threads of ``num_warps`` warps of 32."""
    return max(1, num_warps * 32 // width)


def row_order(x: torch.Tensor) -> tuple[int, ...]:
    """The outer dimensions of ``x`` in the order in which memory holds them, largest stride first.

    Rows walked in this order are read as a stream, also where ``x`` is a transposed view such as [B, H, T, D].
    """
    outer, strides = range(x.ndim - 1), x.stride()
    return tuple(outer) if x.is_contiguous() else tuple(sorted(outer, key=lambda dim: -strides[dim]))


def empty_in_order(
    shape: Sequence[int], order: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty tensor of ``shape`` that memory holds in ``order``; dimensions that ``order`` leaves out come last."""
    axes = order + tuple(range(len(order), len(shape)))
    if axes == tuple(range(len(shape))):
        return torch.empty(shape, dtype=dtype, device=device)
    dense = torch.empty([shape[dim] for dim in axes], dtype=dtype, device=device)
    return dense.permute([axes.index(dim) for dim in range(len(shape))])


class Rows:
    """How a kernel finds row r of several tensors of one shape, [..., H], whatever their strides.

    Outer dimensions that are one stride apart in every tensor are merged; up to three remain, and row r lies at
    ``(r // size_2 // size_1) * stride_0 + (r // size_2 % size_1) * stride_1 + r % size_2 * stride_2``.
    The usual one-stride case has sizes of 1, which Triton compiles to a single multiplication.
    Tensors with more than three outer dimensions that do not merge are copied.

    Attributes:
        count: number of rows.
        sizes: (size_1, size_2).
        tensors: the tensors to pass to the kernel (copies only in the case above).
        strides: for each tensor (stride_0, stride_1, stride_2, stride of the last dimension), in elements.
    """

    __slots__ = ("count", "sizes", "strides", "tensors")

    def __init__(self, order: tuple[int, ...], *tensors: torch.Tensor) -> None:
        sizes, strides = _merge(order, tensors)
        if len(sizes) > 3:
            tensors = tuple(t.permute(*order, t.ndim - 1).contiguous() for t in tensors)
            sizes, strides = _merge(tuple(range(len(order))), tensors)
        self.count = 1
        for size in sizes:
            self.count *= size
        self.tensors = tensors
        missing = 3 - len(sizes)
        self.sizes = tuple(sizes[1:] + [1] * missing) if sizes else (1, 1)
        self.strides = [(*outer, *(0,) * missing, t.stride(-1)) for outer, t in zip(strides, tensors, strict=True)]


def _merge(order: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[list[int]]]:
    """Sizes, and each tensor's strides, of the outer dimensions after merging neighbours in ``order``."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for dim in order:
        size = tensors[0].shape[dim]
        if size == 1:
            continue
        if sizes and all(s[-1] == t.stride(dim) * size for s, t in zip(strides, tensors, strict=True)):
            sizes[-1] *= size
            for s, t in zip(strides, tensors, strict=True):
                s[-1] = t.stride(dim)
        else:
            sizes.append(size)
            for s, t in zip(strides, tensors, strict=True):
                s.append(t.stride(dim))
    return sizes, strides


@triton.jit
def row_offset(
    row: tl.tensor, size_1: tl.tensor, size_2: tl.tensor, stride_0: tl.tensor, stride_1: tl.tensor, stride_2: tl.tensor
) -> tl.tensor:
    """Offset in elements of row ``row`` (int64) of a tensor described by ``Rows``."""
    outer = row // size_2
    return (outer // size_1) * stride_0 + (outer % size_1) * stride_1 + (row % size_2) * stride_2
