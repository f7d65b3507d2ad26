"""Cross-entropy of rows of logits that are scratch: losses out, d logits in place. Formulas: linear_cross_entropy.

The nouns that both backends share, and PyTorch's implementation; Triton's is in ``triton/cross_entropy.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

# What a model does to its logits before the loss: ("mul", factor), ("div", divisor), ("tanh", None), ("cast", dtype).
EpilogueStep = tuple[Literal["mul", "div", "tanh", "cast"], Any]

# Work in the loss's dtype is done on this many logits at a time: 64 MiB a temporary.
_BLOCK = 2**24


class Epilogue(NamedTuple):
    """``outer * tanh(inner * x)``, or ``inner * x`` without ``tanh``; the result's dtype is ``dtype``."""

    inner: float
    tanh: bool
    outer: float
    dtype: torch.dtype


class Terms(NamedTuple):
    """What tells one loss from another. ``class_weight`` is [V]; its sum, 0-d, is given where smoothing needs it.

    ``slope`` is the constant part of the epilogue's derivative, ``inner * outer``, or 1 where the caller multiplies.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    epilogue: Epilogue
    slope: float
    class_weight: torch.Tensor | None
    class_weight_sum: torch.Tensor | None


class Upstream(NamedTuple):
    """What d logits are multiplied by before they are rounded: ``grad / divisor``, None standing for 1.

    ``grad`` is 0-d or [rows], any stride; ``divisor`` is 0-d.
    """

    grad: torch.Tensor | None
    divisor: torch.Tensor | None


class RowStatistics(NamedTuple):
    """What a row's softmax says beside its loss, written where the row is read anyway. Both are [rows].

    Attributes:
        entropy: float32, -sum_v p_v log p_v, in nats; nan where a logit is -inf, as 0 log 0 of floats is.
        argmax: int64, the first of the largest logits. Any column where the row holds nan.
    """

    entropy: torch.Tensor
    argmax: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RowStatistics:
        entropy = torch.empty(rows, dtype=torch.float32, device=device)
        return cls(entropy, torch.empty(rows, dtype=torch.int64, device=device))


class Primitives(Protocol):
    """What a backend implements."""

    @staticmethod
    def cross_entropy_rows(
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor | None,
        terms: Terms,
        upstream: Upstream | None,
        statistics: RowStatistics | None,
    ) -> None:
        """Writes the losses into ``losses``, where given, and d logits over the logits, where ``upstream`` is given.

        ``statistics``, where given, are those of the logits after the epilogue, of the ignored rows too.

        ``logits`` [rows, V] is scratch, before the epilogue; its row stride is a multiple of 64 elements, or V
        itself. Elements between V and the stride that are zero stay zero, and whatever they are, no result depends on
        them. ``labels`` [rows] are in range or ``ignore_index``; ``losses`` [rows] has the dtype of
        ``loss_arithmetic``.
        """

    @staticmethod
    def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``gradient * factor``, rounded once, into ``out``. Both are [rows, width] or [width] and contiguous.

        ``factor`` is 0-d, or [rows]; it has the dtype of the gradient.
        """


def compose(steps: Sequence[EpilogueStep], dtype: torch.dtype) -> Epilogue:
    """The steps as one ``Epilogue``; factors are multiplied in float64."""
    factors, tanh = [1.0, 1.0], False
    for name, value in steps:
        if name == "mul":
            factors[tanh] *= value
        elif name == "div":
            factors[tanh] /= value
        elif name == "cast":
            dtype = value
        elif name == "tanh" and not tanh:
            tanh = True
        else:
            raise ValueError(f"an epilogue has steps 'mul', 'div', 'cast' and at most one 'tanh', got {tuple(steps)}")
    return Epilogue(factors[0], tanh, factors[1], dtype)


def loss_arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the loss of logits of ``dtype`` is computed: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def split(factor: float) -> tuple[float, float]:
    """``factor`` as the sum of two float32 numbers.

    x * high + x * low is x * factor with an error that does not have the same sign for every x; x * float32(factor) is
    not.
    """
    high = struct.unpack("f", struct.pack("f", factor))[0]
    return high, factor - high


def slice_upstream(upstream: Upstream | None, start: int, stop: int) -> Upstream | None:
    if upstream is None or upstream.grad is None or upstream.grad.ndim == 0:
        return upstream
    return Upstream(upstream.grad[start:stop], upstream.divisor)


def slice_statistics(statistics: RowStatistics, start: int, stop: int) -> RowStatistics:
    return RowStatistics(statistics.entropy[start:stop], statistics.argmax[start:stop])


class TorchPrimitives:
    @staticmethod
    def cross_entropy_rows(
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor | None,
        terms: Terms,
        upstream: Upstream | None,
        statistics: RowStatistics | None,
    ) -> None:
        step = max(1, _BLOCK // logits.shape[1])
        for start in range(0, logits.shape[0], step):
            block, stop = logits[start : start + step], start + step
            if statistics is not None:
                _write_statistics(block, terms.epilogue, slice_statistics(statistics, start, stop))
            loss, gradient = _block(block, labels[start:stop], terms, slice_upstream(upstream, start, stop))
            if losses is not None:
                losses[start:stop] = loss
            if gradient is not None:
                block.copy_(gradient)

    @staticmethod
    def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(gradient, factor.unsqueeze(1) if factor.ndim else factor, out=out)


def _write_statistics(logits: torch.Tensor, epilogue: Epilogue, out: RowStatistics) -> None:
    z, _ = _apply_epilogue(logits.to(loss_arithmetic(logits.dtype)), epilogue)
    out.argmax.copy_(z.argmax(1))
    log_p = torch.log_softmax(z, 1)
    out.entropy.copy_(-(log_p.exp() * log_p).sum(1))


def _block(
    logits: torch.Tensor, labels: torch.Tensor, terms: Terms, upstream: Upstream | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses [rows] and, with ``upstream``, d logits [rows, V] of a few rows, in the loss's arithmetic."""
    counted = labels != terms.ignore_index
    target = torch.where(counted, labels, 0).unsqueeze(1)
    nll_share: Any = 1.0 - terms.label_smoothing
    if terms.class_weight is not None:
        nll_share = nll_share * terms.class_weight[target]
    smooth_share = terms.label_smoothing / logits.shape[1]
    weight_sum = logits.shape[1] if terms.class_weight_sum is None else terms.class_weight_sum

    z, tanh = _apply_epilogue(logits.to(loss_arithmetic(logits.dtype)), terms.epilogue)
    top = z.amax(1, keepdim=True)
    shifted = z - top
    picked = shifted.gather(1, target)
    if smooth_share:
        spread = shifted if terms.class_weight is None else shifted * terms.class_weight
        spread = spread.sum(1, keepdim=True)
    p = shifted.exp_()
    total = p.sum(1, keepdim=True)
    log_total = total.log()
    lse = top + log_total

    loss, slope = nll_share * (log_total - picked), nll_share
    if smooth_share:
        loss = loss + smooth_share * (weight_sum * log_total - spread)
        slope = slope + smooth_share * weight_sum
    if terms.z_loss:
        loss = loss + terms.z_loss * lse.square()
        slope = slope + 2.0 * terms.z_loss * lse
    loss = torch.where(counted, loss.squeeze(1), 0.0)
    if upstream is None:
        return loss, None

    gradient = p.div_(total).mul_(slope)
    if smooth_share:
        gradient -= smooth_share if terms.class_weight is None else smooth_share * terms.class_weight
    gradient.scatter_(1, target, gradient.gather(1, target) - nll_share)
    _multiply_upstream(gradient, upstream)
    if tanh is not None:
        gradient *= 1.0 - tanh.square()
    gradient = times(gradient, terms.slope)
    return loss, gradient.masked_fill_(~counted.unsqueeze(1), 0.0)


def _apply_epilogue(x: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits after the epilogue, and the tanh in it."""
    x = times(x, epilogue.inner)
    if not epilogue.tanh:
        return x, None
    tanh = torch.tanh(x)
    return times(tanh, epilogue.outer), tanh


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return x
    high, low = split(factor)
    # An infinite logit has no low part: inf * 0 and inf - inf are nan.
    return x * high + (x * low).masked_fill_(x.isinf(), 0.0)


def _multiply_upstream(gradient: torch.Tensor, upstream: Upstream) -> None:
    grad, divisor = upstream
    if grad is None and divisor is None:
        return
    scale: Any = 1.0 if grad is None else grad.to(gradient.dtype)
    scale = scale if divisor is None else scale / divisor
    gradient *= scale if scale.ndim == 0 else scale.unsqueeze(1)
