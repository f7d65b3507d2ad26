"""Launches of Triton kernels: what shapes and strides decide is prepared once and cached, here for every operation.

A ``Plan`` holds the grid, the integers and the compile-time constants of a launch: nothing that is read from a tensor's
memory, and no address. Triton itself looks at the addresses and integers of every launch (whether they are 1 or
multiples of 16) and chooses the code that was compiled for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

# The number of plans of each kind in the cache, which drops the least recently used. Sequence lengths vary in training.
# A plan is a few hundred bytes, and takes some 10 us to prepare.
_PLANS = 1024

Made = TypeVar("Made")


class Plan(NamedTuple):
    """A launch without its tensors.

    Attributes:
        start: ``kernel[grid]``.
        arguments: the kernel's parameters after the tensors, in its order.
        num_warps: of the device's width.
    """

    start: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_warps: int

    @classmethod
    def of(
        cls,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[int | float, ...],
        num_warps: int,
        rounds_products: bool = False,
        **constants: Any,
    ) -> Plan:
        """A launch of ``kernel[grid]``.

        Args:
            arguments: the parameters between the tensors and the constants.
            num_warps: warps of 32 threads.
            rounds_products: a product is rounded before something is added to it, as separate kernels do.
            constants: the ``tl.constexpr`` parameters, which are the kernel's last.
        """
        if torch.version.hip:  # wavefronts of 64 threads
            num_warps = wider_warps(num_warps, 64)
        names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        start = functools.partial(kernel[grid], enable_fp_fusion=False) if rounds_products else kernel[grid]
        return cls(start, (*arguments, *(constants[name] for name in names)), num_warps)


def cached_plan(make: Callable[..., Made]) -> functools._lru_cache_wrapper[Made]:
    """Decorates a function of shapes, strides, dtypes and options that makes a plan."""
    return functools.lru_cache(maxsize=_PLANS)(make)


def launch(plan: Plan, device: torch.device, *tensors: torch.Tensor | None) -> None:
    """Starts the plan's kernel on ``tensors``, on ``device`` and its current stream.

    Triton launches on the *current* device. In a model spread over several GPUs the tensors may be on another one, and
    only then is the context manager paid for.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        plan.start(*tensors, *plan.arguments, num_warps=plan.num_warps)
    else:
        with torch.cuda.device(device):
            plan.start(*tensors, *plan.arguments, num_warps=plan.num_warps)


def wider_warps(num_warps: int, width: int) -> int:
    """How many warps of ``width`` threads have the threads of ``num_warps`` warps of 32."""
    return max(1, num_warps * 32 // width)


@triton.jit
def row_offset(
    row: tl.tensor, size_1: tl.tensor, size_2: tl.tensor, stride_0: tl.tensor, stride_1: tl.tensor, stride_2: tl.tensor
) -> tl.tensor:
    """Offset in elements of row ``row`` (int64) of a tensor described by a ``MergedRows``."""
    outer = row // size_2
    return (outer // size_1) * stride_0 + (outer % size_1) * stride_1 + (row % size_2) * stride_2
