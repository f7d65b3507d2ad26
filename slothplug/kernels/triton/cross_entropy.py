"""Cross-entropy of rows of logits on Triton, gradient in place. Formulas, byte counts: ../linear_cross_entropy.py.

One program takes one row and walks the vocabulary twice. The first walk finds lse: every lane keeps its own running
maximum and sum, with one exponential an element and no exchange between lanes until the end of the row. The second
writes d logits over the logits. It goes backwards, because what the first walk read last is still in the L2 cache.

Everything is float32 in registers. lse is not formed for the softmax: max and log-sum stay apart, as their sum would
lose what a float32 of the size of the largest logit cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from slothplug.kernels.linear_cross_entropy import Epilogue, Terms, Upstream, split
from slothplug.kernels.triton.launch import launch
from slothplug.kernels.triton.offline import OfflineCase, noted_launches


@dataclass(frozen=True)
class Walk:
    """Launch knobs of rows with at most ``max_vocabulary`` logits; ``block`` of them are taken at a time."""

    max_vocabulary: int
    block: int
    num_warps: int


# 16 elements a thread are two 16-byte loads of bfloat16. With the running maxima and sums that is 64 registers
# where there is no epilogue, so two of the widest programs fit a multiprocessor; more would push each other's rows out
# of the L2 cache between the walks.
_WALKS = (
    Walk(max_vocabulary=512, block=512, num_warps=1),
    Walk(max_vocabulary=2048, block=2048, num_warps=4),
    Walk(max_vocabulary=2**62, block=8192, num_warps=16),
)


class TritonPrimitives:
    """See ``linear_cross_entropy.Primitives``."""

    @staticmethod
    def cross_entropy_rows(
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor | None,
        terms: Terms,
        upstream: Upstream | None,
    ) -> None:
        rows, vocabulary = logits.shape
        walk = next(walk for walk in _WALKS if vocabulary <= walk.max_vocabulary)
        grad, divisor = upstream or (None, None)
        inner, outer = terms.epilogue.inner, terms.epilogue.outer
        launch(
            _cross_entropy_rows_kernel,
            (rows,),
            logits.device,
            logits,
            labels,
            losses,
            terms.class_weight,
            terms.class_weight_sum,
            grad,
            divisor,
            logits.stride(0),
            labels.stride(0),
            0 if grad is None or grad.ndim == 0 else grad.stride(0),
            vocabulary,
            terms.ignore_index,
            1.0 - terms.label_smoothing,
            terms.label_smoothing / vocabulary,
            float(terms.z_loss),
            *split(inner),
            *split(outer),
            *split(inner * outer),
            INNER=inner != 1.0,
            TANH=terms.epilogue.tanh,
            OUTER=outer != 1.0,
            SLOPE=inner * outer != 1.0,
            SMOOTHING=terms.label_smoothing != 0.0,
            Z_LOSS=terms.z_loss != 0.0,
            WRITE_GRAD=upstream is not None,
            BLOCK=walk.block,
            num_warps=walk.num_warps,
        )


@triton.jit
def _times(x: tl.tensor, high: tl.tensor, low: tl.tensor, NEEDED: tl.constexpr) -> tl.tensor:
    """x times a factor given as the sum of two float32."""
    if NEEDED:
        x = x * high + x * low
    return x


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """tanh to about 3 units roundoff. Up to 0.6, where 1 - exp would cancel, x + x^3 P(x^2) with a fitted P."""
    u = x * x
    p = -5.8951555e-3 * u + 2.0795969e-2
    p = p * u - 5.3783830e-2
    p = p * u + 1.3331924e-1
    p = p * u - 3.3333299e-1
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.6, x + x * u * p, tl.where(x < 0.0, -large, large))


@triton.jit
def _tanh_slope(x: tl.tensor) -> tl.tensor:
    """1 - tanh(x)^2, written so that nothing cancels where tanh is near 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    class_weight_ptr: tl.tensor,
    class_weight_sum_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    logits_stride: tl.tensor,
    labels_stride: tl.tensor,
    grad_stride: tl.tensor,
    vocabulary: tl.tensor,
    ignore_index: tl.tensor,
    nll_share: tl.tensor,
    smooth_share: tl.tensor,
    z_loss: tl.tensor,
    inner_high: tl.tensor,
    inner_low: tl.tensor,
    outer_high: tl.tensor,
    outer_low: tl.tensor,
    slope_high: tl.tensor,
    slope_low: tl.tensor,
    INNER: tl.constexpr,
    TANH: tl.constexpr,
    OUTER: tl.constexpr,
    SLOPE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    label = tl.load(labels_ptr + row * labels_stride)
    counted = label != ignore_index
    target = tl.where(counted, label, 0)
    if class_weight_ptr is not None:
        nll_share = nll_share * tl.load(class_weight_ptr + target)

    # Read before the second walk overwrites it; the reductions between the walks are the barrier.
    z_target = _times(tl.load(logits_ptr + target).to(tl.float32), inner_high, inner_low, INNER)
    if TANH:
        z_target = _tanh(z_target)
    z_target = _times(z_target, outer_high, outer_low, OUTER)

    lanes = tl.arange(0, BLOCK)
    # A finite start: -inf - (-inf) is nan, and logits may be -inf.
    maximum = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    spread = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        # The mask is the row's stride, a multiple of 64, so that loads stay 16 bytes wide for every vocabulary.
        x = tl.load(logits_ptr + columns, mask=columns < logits_stride, other=0.0).to(tl.float32)
        z = _times(x, inner_high, inner_low, INNER)
        if TANH:
            z = _tanh(z)
        z = _times(z, outer_high, outer_low, OUTER)
        inside = columns < vocabulary
        z = tl.where(inside, z, float("-inf"))
        above = z - maximum
        shrink = tl.exp(-tl.abs(above))
        total = tl.where(above > 0.0, total * shrink + 1.0, total + shrink)
        maximum = tl.maximum(maximum, z)
        if SMOOTHING:
            # Relative to the target's logit, which keeps the sum small where all logits are large.
            distance = z - z_target
            if class_weight_ptr is not None:
                distance *= tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
            spread += tl.where(inside, distance, 0.0)

    top = tl.max(maximum, 0)
    row_total = tl.sum(total * tl.exp(maximum - top), 0)
    log_total = tl.log(row_total)
    nll = log_total + (top - z_target)
    lse = top + log_total

    weight_sum = vocabulary * 1.0
    if class_weight_sum_ptr is not None:
        weight_sum = tl.load(class_weight_sum_ptr)
    if losses_ptr is not None:
        loss = nll_share * nll
        if SMOOTHING:
            loss += smooth_share * (weight_sum * nll - tl.sum(spread, 0))
        if Z_LOSS:
            loss += z_loss * lse * lse
        tl.store(losses_ptr + row, tl.where(counted, loss, 0.0))

    if WRITE_GRAD:
        slope = nll_share
        if SMOOTHING:
            slope += smooth_share * weight_sum
        if Z_LOSS:
            slope += 2.0 * z_loss * lse
        inverse_total = 1.0 / row_total
        scale = 1.0
        if grad_ptr is not None:
            scale = tl.load(grad_ptr + row * grad_stride).to(tl.float32)
        if divisor_ptr is not None:
            scale = scale / tl.load(divisor_ptr)
        blocks = tl.cdiv(vocabulary, BLOCK)
        for block in range(blocks):
            columns = (blocks - 1 - block) * BLOCK + lanes
            mask = columns < logits_stride
            x = tl.load(logits_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            argument = _times(x, inner_high, inner_low, INNER)
            z = argument
            if TANH:
                z = _tanh(z)
            z = _times(z, outer_high, outer_low, OUTER)
            d = tl.exp(z - top) * inverse_total * slope
            if SMOOTHING:
                if class_weight_ptr is not None:
                    d -= smooth_share * tl.load(class_weight_ptr + columns, mask=columns < vocabulary, other=0.0)
                else:
                    d -= smooth_share
            d = tl.where(columns == target, d - nll_share, d) * scale
            if TANH:
                d *= _tanh_slope(argument)
            d = _times(d, slope_high, slope_low, SLOPE)
            d = tl.where(counted, d, 0.0)
            tl.store(logits_ptr + columns, d.to(logits_ptr.dtype.element_ty), mask=mask)


# The ways in which a loss is computed: without gradients; with gradients ahead of backward, of a mean and of a sum,
# which divides by nothing; with those of backward, which has an upstream gradient for each row.
_Way = Literal["loss", "ahead", "ahead_of_sum", "backward"]


def offline_cases() -> Iterable[OfflineCase]:
    """Each way in bfloat16; each walk, alignment, dtype, epilogue and option where it meets the most code, ahead."""
    plain = Epilogue(1.0, False, 1.0, torch.float32)
    capped = Epilogue(1 / 30, True, 30.0, torch.float32)
    scaled = Epilogue(0.0625, False, 1.0, torch.float32)
    with noted_launches() as cases:
        for way in get_args(_Way):
            _note(torch.bfloat16, 128256, plain, way)
        for vocabulary in (257, 1000, 65537):
            _note(torch.bfloat16, vocabulary, plain)
        for dtype in (torch.float16, torch.float32):
            _note(dtype, 128256, plain)
            _note(dtype, 128256, capped, "backward")
        _note(torch.bfloat16, 256000, capped)
        _note(torch.bfloat16, 256000, scaled)
        _note(torch.bfloat16, 128256, plain, label_smoothing=0.1, z_loss=1e-4)
        _note(torch.bfloat16, 128256, capped, label_smoothing=0.1, weighted=True)
    return cases


def _note(
    dtype: torch.dtype,
    vocabulary: int,
    epilogue: Epilogue,
    way: _Way = "ahead",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weighted: bool = False,
) -> None:
    logits = torch.empty(2048, -(-vocabulary // 64) * 64, dtype=dtype, device="meta")[:, :vocabulary]
    labels = torch.empty(2048, dtype=torch.int64, device="meta")
    losses = torch.empty(2048, device="meta")
    scalar = torch.empty((), device="meta")
    class_weight = torch.empty(vocabulary, device="meta") if weighted else None
    terms = Terms(-100, label_smoothing, z_loss, epilogue, class_weight, scalar if weighted else None)
    upstream = {
        "loss": None,
        "ahead": Upstream(None, scalar),
        "ahead_of_sum": Upstream(None, None),
        "backward": Upstream(losses, None),
    }[way]
    TritonPrimitives.cross_entropy_rows(logits, labels, None if way == "backward" else losses, terms, upstream)
