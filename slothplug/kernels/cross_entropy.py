"""Cross-entropy of rows of logits in a scratch buffer: losses out, gradients in place of the logits.

The types that both backends share, and PyTorch's implementation; Triton's is ``triton/cross_entropy.py``. Formulas and
byte counts: ``linear_cross_entropy.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.backend import Backend, primitives_on

# What a model does to its logits before the loss: ("mul", factor), ("div", divisor), ("tanh", None), ("cast", dtype).
EpilogueStep = tuple[Literal["mul", "div", "tanh", "cast"], Any]

# Work in the loss's dtype is done on this many logits at a time: 64 MiB a temporary.
_BLOCK = 2**24


class Epilogue(NamedTuple):
    """``outer * tanh(inner * x)``, a soft cap, or ``inner * x`` without ``tanh``; the result's dtype is ``dtype``."""

    inner: float
    tanh: bool
    outer: float
    dtype: torch.dtype


class LossSpec(NamedTuple):
    """The loss of one row, as a function of its logits and its label.

    Attributes:
        ignore_index: the label of rows without loss and gradient.
        label_smoothing: in [0, 1].
        epilogue: applied to the logits first.
        slope: the constant part of the epilogue's derivative, ``inner * outer``, or 1 where the caller multiplies by
            it.
        class_weight: [V] in the loss's arithmetic, contiguous, or None.
        class_weight_sum: 0-d, the sum of ``class_weight``; needed with label smoothing only.
    """

    ignore_index: int
    label_smoothing: float
    epilogue: Epilogue
    slope: float
    class_weight: torch.Tensor | None
    class_weight_sum: torch.Tensor | None


class Upstream(NamedTuple):
    """The factor of the logits' gradients before they are rounded: ``grad_output / divisor``, None standing for 1.

    Attributes:
        grad_output: the loss's gradient, 0-d or [rows], any stride.
        divisor: 0-d, what the sum of the losses is divided by.
    """

    grad_output: torch.Tensor | None
    divisor: torch.Tensor | None


class RowStatistics(NamedTuple):
    """Statistics of each row's softmax, written in the pass that computes its loss. Both are [rows].

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


class Primitives:
    """PyTorch's functions; Triton's class has the same ones."""

    @staticmethod
    def cross_entropy_rows(
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor | None,
        spec: LossSpec,
        upstream: Upstream | None,
        statistics: RowStatistics | None,
    ) -> None:
        """Writes the losses, the statistics and, over the logits, their gradients.

        Args:
            logits: [rows, V] before the epilogue, scratch. The row stride is V or a multiple of 64 elements. Elements
                between V and the stride that are zero stay zero; whatever they are, no result depends on them.
            labels: [rows] int64, in range or ``ignore_index``.
            losses: [rows] of ``loss_arithmetic``, written where given.
            spec: the loss.
            upstream: where given, the gradients are written over the logits.
            statistics: where given, written for the logits after the epilogue, also of ignored rows.
        """
        step = max(1, _BLOCK // logits.shape[1])
        for start in range(0, logits.shape[0], step):
            block, stop = logits[start : start + step], start + step
            if statistics is not None:
                _write_statistics(block, spec.epilogue, slice_statistics(statistics, start, stop))
            loss, gradient = _block(block, labels[start:stop], spec, slice_upstream(upstream, start, stop))
            if losses is not None:
                losses[start:stop] = loss
            if gradient is not None:
                block.copy_(gradient)

    @staticmethod
    def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``gradient * factor``, rounded once, into ``out``. Both are [rows, width] or [width] and contiguous.

        ``factor`` is 0-d, or [rows]; it has the dtype of the gradient.
        """
        torch.mul(gradient, factor.unsqueeze(1) if factor.ndim else factor, out=out)


def primitives(backend: Backend) -> type[Primitives]:
    """The functions of ``backend``. Those of Triton compute in float32: float64 logits are for PyTorch's."""
    return primitives_on(backend, Primitives, "cross_entropy")


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

    The error of x * high + x * low has no preferred sign. That of x * float32(factor) has the same sign for every x.
    """
    high = struct.unpack("f", struct.pack("f", factor))[0]
    return high, factor - high


def slice_upstream(upstream: Upstream | None, start: int, stop: int) -> Upstream | None:
    if upstream is None or upstream.grad_output is None or upstream.grad_output.ndim == 0:
        return upstream
    return Upstream(upstream.grad_output[start:stop], upstream.divisor)


def slice_statistics(statistics: RowStatistics, start: int, stop: int) -> RowStatistics:
    return RowStatistics(statistics.entropy[start:stop], statistics.argmax[start:stop])


def _write_statistics(logits: torch.Tensor, epilogue: Epilogue, out: RowStatistics) -> None:
    z, _ = _apply_epilogue(logits.to(loss_arithmetic(logits.dtype)), epilogue)
    out.argmax.copy_(z.argmax(1))
    log_p = torch.log_softmax(z, 1)
    out.entropy.copy_(-(log_p.exp() * log_p).sum(1))


def _block(
    logits: torch.Tensor, labels: torch.Tensor, spec: LossSpec, upstream: Upstream | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses [rows] and, with ``upstream``, the gradients [rows, V] of a few rows, in the loss's arithmetic."""
    valid = labels != spec.ignore_index
    target = torch.where(valid, labels, 0).unsqueeze(1)
    nll_share: Any = 1.0 - spec.label_smoothing
    if spec.class_weight is not None:
        nll_share = nll_share * spec.class_weight[target]
    smooth_share = spec.label_smoothing / logits.shape[1]
    weight_sum = logits.shape[1] if spec.class_weight_sum is None else spec.class_weight_sum

    z, tanh = _apply_epilogue(logits.to(loss_arithmetic(logits.dtype)), spec.epilogue)
    shifted = z - z.amax(1, keepdim=True)
    target_shifted = shifted.gather(1, target)
    if smooth_share:
        weighted = shifted if spec.class_weight is None else shifted * spec.class_weight
        shifted_sum = weighted.sum(1, keepdim=True)
    p = shifted.exp_()
    total = p.sum(1, keepdim=True)
    log_total = total.log()

    loss, slope = nll_share * (log_total - target_shifted), nll_share
    if smooth_share:
        loss = loss + smooth_share * (weight_sum * log_total - shifted_sum)
        slope = slope + smooth_share * weight_sum
    loss = torch.where(valid, loss.squeeze(1), 0.0)
    if upstream is None:
        return loss, None

    gradient = p.div_(total).mul_(slope)
    if smooth_share:
        gradient -= smooth_share if spec.class_weight is None else smooth_share * spec.class_weight
    gradient.scatter_(1, target, gradient.gather(1, target) - nll_share)
    _multiply_upstream(gradient, upstream)
    if tanh is not None:
        gradient *= 1.0 - tanh.square()
    gradient = times(gradient, spec.slope)
    return loss, gradient.masked_fill_(~valid.unsqueeze(1), 0.0)


def _apply_epilogue(x: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits after the epilogue, and the tanh in it."""
    x = times(x, epilogue.inner)
    if not epilogue.tanh:
        return x, None
    tanh = torch.tanh(x)
    return times(tanh, epilogue.outer), tanh


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x * factor`` with the factor as ``split`` has it."""
    if factor == 1.0:
        return x
    high, low = split(factor)
    # An infinite logit has no low part: inf * 0 and inf - inf are nan.
    return x * high + (x * low).masked_fill_(x.isinf(), 0.0)


def _multiply_upstream(gradient: torch.Tensor, upstream: Upstream) -> None:
    grad_output, divisor = upstream
    if grad_output is None and divisor is None:
        return
    scale: Any = 1.0 if grad_output is None else grad_output.to(gradient.dtype)
    scale = scale if divisor is None else scale / divisor
    gradient *= scale if scale.ndim == 0 else scale.unsqueeze(1)
