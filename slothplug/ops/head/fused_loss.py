"""The fused loss of lazy logits: ``F.cross_entropy`` with the recorded steps as epilogue, or None where it differs."""

from __future__ import annotations

from typing import Any

import torch

from slothplug.ops.head.label_count import max_valid, ordinary
from slothplug.ops.head.lazy_value import LazyValue
from slothplug.patching.predicates import plain


def fused_cross_entropy(
    value: LazyValue,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy``, signature and all, of lazy logits ``input`` whose value is ``value``.

    Returns:
        The loss, as part of the graph of the head's operands; None where ``F.cross_entropy`` of the computed logits is
        to answer: probabilities as labels, deprecated options, an epilogue that the kernel does not know.
    """
    call = value.call
    if not call.open or value.is_computed or input.ndim != 2 or not _takes(input, target, weight):
        return None
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    call.check_current()
    epilogue = value.epilogue()
    if sum(name == "tanh" for name, _ in epilogue) > 1:
        return None
    if torch.is_autocast_enabled(input.device.type) and input.dtype not in (torch.float32, torch.float64):
        epilogue.append(("cast", torch.float32))  # autocast computes log_softmax and nll_loss in float32
    statistics = value.room_for_statistics()
    options: dict[str, Any] = {}
    if statistics is not None:
        options["statistics"] = statistics  # of every row
    else:
        options["max_valid"] = max_valid(target, ignore_index)
    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        hidden, head, bias = call.operands()
        low_rank = call.low_rank_of(value.rows)
        if low_rank is not None:
            options["low_rank"] = low_rank
        loss = call.loss(
            value.rows(hidden),
            head,
            ordinary(target),
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            class_weight=weight,
            epilogue=tuple(epilogue),
            chunk_bytes=call.chunk_bytes,
            **options,
        )
    call.loss_taken = True
    if statistics is not None:
        call.statistics = statistics
    return call.calls.serve(loss)


def _takes(input: torch.Tensor, target: object, weight: torch.Tensor | None) -> bool:
    """Whether the kernel takes these labels and class weights."""
    if not isinstance(target, torch.Tensor) or not plain(ordinary(target)) or target.dtype is not torch.int64:
        return False
    if target.shape != input.shape[:1] or target.device != input.device:
        return False
    return weight is None or (plain(weight) and weight.dtype is input.dtype and not weight.requires_grad)
