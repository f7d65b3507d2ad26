"""Checks of the arguments of ``linear_cross_entropy``, whose docstring lists the errors."""

from __future__ import annotations

import torch

from slothplug.kernels.cross_entropy import RowStatistics


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk_bytes: int,
) -> None:
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        names = f"hidden {hidden.dtype}, weight {weight.dtype}" + (f", bias {bias.dtype}" if bias is not None else "")
        raise TypeError(f"linear_cross_entropy needs operands of one dtype, got {names}")
    if not hidden.is_floating_point() or labels.dtype != torch.int64:
        raise TypeError(f"hidden is floating and labels are int64, got {hidden.dtype} and {labels.dtype}")
    if class_weight is not None and not class_weight.is_floating_point():
        raise TypeError(f"class_weight is floating, got {class_weight.dtype}")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (hidden, weight, labels))
        raise ValueError(f"hidden [N, H], weight [V, H] and labels [N] do not fit: {shapes}")
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} is [V] = {tuple(weight.shape[:1])}, got {tuple(vector.shape)}")
    if weight.shape[0] == 0:
        raise ValueError("weight [V, H] has no rows: there is no cross-entropy over an empty vocabulary")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes is positive, not {chunk_bytes}")


def check_statistics(statistics: RowStatistics, hidden: torch.Tensor) -> None:
    for name, out, dtype in zip(statistics._fields, statistics, (torch.float32, torch.int64), strict=True):
        if out.shape != hidden.shape[:1] or out.dtype != dtype or out.device != hidden.device or out.stride() != (1,):
            raise ValueError(
                f"statistics.{name} is [N] = {tuple(hidden.shape[:1])} of {dtype}, contiguous and on {hidden.device}, "
                f"got {tuple(out.shape)} of {out.dtype}, strides {out.stride()}, on {out.device}"
            )


def check_low_rank(u: torch.Tensor, b: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    if u.dtype != b.dtype or not u.is_floating_point() or (u.dtype is torch.float64) > (hidden.dtype is torch.float64):
        raise TypeError(
            f"low_rank is floating and of one dtype, float64 only beside float64, got u {u.dtype}, b {b.dtype}, "
            f"hidden {hidden.dtype}"
        )
    if u.ndim != 2 or b.ndim != 2 or u.shape != (hidden.shape[0], b.shape[1]) or b.shape[0] != weight.shape[0]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (u, b, hidden, weight))
        raise ValueError(f"u [N, r] and b [V, r] do not fit hidden [N, H] and weight [V, H]: {shapes}")
