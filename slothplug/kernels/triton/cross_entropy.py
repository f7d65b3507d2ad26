"""Cross-entropy of rows of logits on Triton, gradient in place. Formulas, byte counts: ../linear_cross_entropy.py.

One program serves one row in two passes. The first pass finds lse: every lane keeps its own running maximum and sum,
with one exponential an element and one more for each group of eight, and no exchange between lanes until the end of the
row. The second pass overwrites the logits with their gradients. It runs backwards, because what the first pass read
last may still be in the L2 cache. The number of instructions matters here: an H200 is nearly as busy with two
exponentials an element as with the element's bytes.

Where the rows' statistics are required, the first pass also keeps every lane's sum of e^(z - max) (z - max), from which
the entropy follows, and the column of its maximum.

Everything is float32 in registers. The softmax is computed from max and log-sum, not from lse: their sum would lose
what a float32 of the size of the largest logit cannot hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from slothplug.kernels.cross_entropy import Epilogue, LossSpec, RowStatistics, Upstream, split
from slothplug.kernels.row_layout import Ints
from slothplug.kernels.triton.launch import Plan, cached_plan, launch


class Tile(NamedTuple):
    """Launch knobs of rows with at most ``max_vocabulary`` logits, in blocks of ``block``."""

    max_vocabulary: int
    block: int
    num_warps: int


# 8 or 16 elements a thread: one or two 16-byte loads of bfloat16. H200, 2048 rows of 128256 logits: 0.33 ms with 32
# warps, 0.36 with 16; reading and writing them once takes 0.25. A third of the second pass is read from memory again.
# With one row a multiprocessor (33 registers a thread) nothing is, but then latency shows, and the time is the same.
_TILES = (
    Tile(max_vocabulary=512, block=512, num_warps=2),
    Tile(max_vocabulary=2048, block=2048, num_warps=8),
    Tile(max_vocabulary=2**62, block=16384, num_warps=32),
)
# 8 elements a thread.
_SCALE_BLOCK, _SCALE_WARPS = 1024, 4


class TritonPrimitives:
    """See ``cross_entropy.Primitives``."""

    @staticmethod
    def cross_entropy_rows(
        logits: torch.Tensor,
        labels: torch.Tensor,
        losses: torch.Tensor | None,
        spec: LossSpec,
        upstream: Upstream | None,
        statistics: RowStatistics | None,
    ) -> None:
        grad_output, divisor = upstream or (None, None)
        entropy, argmax = statistics or (None, None)
        grad_output_stride = 0 if grad_output is None or grad_output.ndim == 0 else grad_output.stride(0)
        plan = _rows_plan(
            logits.shape,
            (logits.stride(0), labels.stride(0), grad_output_stride),
            spec.ignore_index,
            spec.label_smoothing,
            spec.epilogue,
            spec.slope,
            upstream is not None,
        )
        class_weight, class_weight_sum = spec.class_weight, spec.class_weight_sum
        tensors = (logits, labels, losses, entropy, argmax, class_weight, class_weight_sum, grad_output, divisor)
        launch(plan, logits.device, *tensors)

    @staticmethod
    def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        launch(_scale_plan(gradient.shape, factor.ndim > 0), gradient.device, gradient, factor, out)


@cached_plan
def _rows_plan(
    shape: Ints,
    strides: Ints,
    ignore_index: int,
    label_smoothing: float,
    epilogue: Epilogue,
    slope: float,
    write_grad: bool,
) -> Plan:
    """The launch for logits of ``shape`` and the row strides of logits, labels and grad_output."""
    rows, vocabulary = shape
    tile = next(tile for tile in _TILES if vocabulary <= tile.max_vocabulary)
    shares = (1.0 - label_smoothing, label_smoothing / vocabulary)
    factors = (*split(epilogue.inner), *split(epilogue.outer), *split(slope))
    return Plan.of(
        _cross_entropy_rows_kernel,
        (rows,),
        (*strides, vocabulary, ignore_index, *shares, *factors),
        tile.num_warps,
        INNER=epilogue.inner != 1.0,
        TANH=epilogue.tanh,
        OUTER=epilogue.outer != 1.0,
        SLOPE=slope != 1.0,
        SMOOTHING=label_smoothing != 0.0,
        WRITE_GRAD=write_grad,
        BLOCK=tile.block,
    )


@cached_plan
def _scale_plan(shape: Ints, per_row: bool) -> Plan:
    elements = math.prod(shape)
    grid = (triton.cdiv(elements, _SCALE_BLOCK),)
    return Plan.of(_scale_kernel, grid, (elements, shape[-1]), _SCALE_WARPS, PER_ROW=per_row, BLOCK=_SCALE_BLOCK)


@triton.jit
def _scale_kernel(
    gradient_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    out_ptr: tl.tensor,
    elements: tl.tensor,
    width: tl.tensor,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements
    factor = tl.load(factor_ptr + index // width, mask=mask, other=0.0) if PER_ROW else tl.load(factor_ptr)
    gradient = tl.load(gradient_ptr + index, mask=mask, other=0.0) * factor
    tl.store(out_ptr + index, gradient.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    """e^x, with 0 for results below float32's normal numbers: tl.exp spends three instructions more on those."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _times(x: tl.tensor, high: tl.tensor, low: tl.tensor, NEEDED: tl.constexpr) -> tl.tensor:
    """x times a factor given as the sum of two float32; an infinite x has no low part, as inf - inf is nan."""
    if NEEDED:
        x = x * high + tl.where(tl.abs(x) == float("inf"), 0.0, x * low)
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
def _logits(
    x: tl.tensor,
    inner_high: tl.tensor,
    inner_low: tl.tensor,
    outer_high: tl.tensor,
    outer_low: tl.tensor,
    INNER: tl.constexpr,
    TANH: tl.constexpr,
    OUTER: tl.constexpr,
) -> tl.tensor:
    """The logits after the epilogue."""
    x = _times(x, inner_high, inner_low, INNER)
    if TANH:
        x = _tanh(x)
    return _times(x, outer_high, outer_low, OUTER)


@triton.jit
def _distance(
    z: tl.tensor, anchor: tl.tensor, columns: tl.tensor, class_weight_ptr: tl.tensor, vocabulary: tl.tensor
) -> tl.tensor:
    """w (z - anchor): relative to the target's logit, which keeps the sum small where all logits are large."""
    inside = columns < vocabulary
    distance = z - anchor
    if class_weight_ptr is not None:
        distance *= tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
    return tl.where(inside, distance, 0.0)


@triton.jit
def _add_block(z: tl.tensor, maximum: tl.tensor, total: tl.tensor, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Running maximum, and sum of exponentials relative to it, of every lane; a lane has ``GROUP`` neighbours."""
    z = tl.reshape(z, [maximum.shape[0], GROUP])
    higher = tl.maximum(maximum, tl.max(z, 1))
    return higher, total * _exp(maximum - higher) + tl.sum(_exp(z - higher[:, None]), 1)


@triton.jit
def _add_statistics(
    z: tl.tensor,
    start: tl.tensor,
    vocabulary: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    moment: tl.tensor,
    best: tl.tensor,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Before ``_add_block``: every lane's sum of e^(z - max) (z - max), and the first column of its best neighbours."""
    LANES: tl.constexpr = maximum.shape[0]
    columns = start + tl.arange(0, LANES) * GROUP
    z = tl.reshape(z, [LANES, GROUP])
    higher = tl.maximum(maximum, tl.max(z, 1))
    distance = z - higher[:, None]
    terms = tl.where(columns[:, None] + tl.arange(0, GROUP)[None, :] < vocabulary, _exp(distance) * distance, 0.0)
    moment = (moment + (maximum - higher) * total) * _exp(maximum - higher) + tl.sum(terms, 1)
    return moment, tl.where(higher > maximum, columns, best)


@triton.jit
def _write_zeros(
    logits_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    logits_stride: tl.tensor,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row whose label is ignored: a loss of zero and gradients of zero."""
    if losses_ptr is not None:
        tl.store(losses_ptr, 0.0)
    if WRITE_GRAD:
        for start in range(0, logits_stride, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(logits_ptr + columns, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), mask=columns < logits_stride)


@triton.jit
def _grad_logits(
    x: tl.tensor,
    columns: tl.tensor,
    top: tl.tensor,
    slope: tl.tensor,
    smooth_share: tl.tensor,
    class_weight_ptr: tl.tensor,
    vocabulary: tl.tensor,
    inner_high: tl.tensor,
    inner_low: tl.tensor,
    outer_high: tl.tensor,
    outer_low: tl.tensor,
    slope_high: tl.tensor,
    slope_low: tl.tensor,
    onehot: tl.tensor,
    INNER: tl.constexpr,
    TANH: tl.constexpr,
    OUTER: tl.constexpr,
    SLOPE: tl.constexpr,
    SMOOTHING: tl.constexpr,
) -> tl.tensor:
    """Gradients of the logits ``x`` in ``columns``: ``slope`` exp(z - top) less the smoothing and ``onehot``."""
    argument = _times(x, inner_high, inner_low, INNER)
    z = argument
    if TANH:
        z = _tanh(z)
    d = _exp(_times(z, outer_high, outer_low, OUTER) - top) * slope
    if SMOOTHING:
        if class_weight_ptr is not None:
            d -= smooth_share * tl.load(class_weight_ptr + columns, mask=columns < vocabulary, other=0.0)
        else:
            d -= smooth_share
    if onehot is not None:
        d -= onehot
    if TANH:
        d *= _tanh_slope(argument)
    return _times(d, slope_high, slope_low, SLOPE)


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    losses_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    argmax_ptr: tl.tensor,
    class_weight_ptr: tl.tensor,
    class_weight_sum_ptr: tl.tensor,
    grad_output_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    logits_stride: tl.tensor,
    labels_stride: tl.tensor,
    grad_output_stride: tl.tensor,
    vocabulary: tl.tensor,
    ignore_index: tl.tensor,
    nll_share: tl.tensor,
    smooth_share: tl.tensor,
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
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = 8  # a 16-byte load of bfloat16
    PADDING: tl.constexpr = 64  # logits_stride is the next multiple of it, or the vocabulary itself
    dtype = logits_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    label = tl.load(labels_ptr + row * labels_stride)
    lanes = tl.arange(0, BLOCK)
    # Masks of loads and stores are the row's stride: a multiple of 64, so that they are 16 bytes wide for every
    # vocabulary. Rows of a head with a bias are dense; an odd vocabulary is then read in narrow loads.
    if losses_ptr is not None:
        losses_ptr += row
    ignored = label == ignore_index
    if entropy_ptr is None:
        if ignored:
            _write_zeros(logits_ptr, losses_ptr, logits_stride, WRITE_GRAD, BLOCK)
            return
    else:
        label = tl.where(ignored, 0, label)

    if class_weight_ptr is not None:
        nll_share = nll_share * tl.load(class_weight_ptr + label)
    # Read before the second pass overwrites it; the reductions between the passes are the barrier.
    x_target = tl.load(logits_ptr + label).to(tl.float32)
    z_target = _logits(x_target, inner_high, inner_low, outer_high, outer_low, INNER, TANH, OUTER)

    # Finite, also where the target is impossible: the distances of the others from it would be nan.
    anchor = tl.where(z_target == float("-inf"), 0.0, z_target)
    # A finite start: -inf - (-inf) is nan, and logits may be -inf.
    maximum = tl.full([BLOCK // GROUP], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    distances = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK // GROUP], tl.float32)
    best = tl.zeros([BLOCK // GROUP], tl.int32)
    whole = vocabulary // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        columns = start + lanes
        x = tl.load(logits_ptr + columns).to(tl.float32)
        z = _logits(x, inner_high, inner_low, outer_high, outer_low, INNER, TANH, OUTER)
        if entropy_ptr is not None:
            moment, best = _add_statistics(z, start, vocabulary, maximum, total, moment, best, GROUP)
        maximum, total = _add_block(z, maximum, total, GROUP)
        if SMOOTHING:
            distances += _distance(z, anchor, columns, class_weight_ptr, vocabulary)
    columns = whole + lanes
    x = tl.load(logits_ptr + columns, mask=columns < logits_stride, other=0.0).to(tl.float32)
    z = _logits(x, inner_high, inner_low, outer_high, outer_low, INNER, TANH, OUTER)
    if SMOOTHING:
        distances += _distance(z, anchor, columns, class_weight_ptr, vocabulary)
    z = tl.where(columns < vocabulary, z, float("-inf"))
    if entropy_ptr is not None:
        moment, best = _add_statistics(z, whole, vocabulary, maximum, total, moment, best, GROUP)
    maximum, total = _add_block(z, maximum, total, GROUP)

    top = tl.max(maximum, 0)
    row_total = tl.sum(total * _exp(maximum - top), 0)
    log_total = tl.log(row_total)
    nll = log_total + (top - z_target)

    if entropy_ptr is not None:
        row_moment = tl.sum((moment + (maximum - top) * total) * _exp(maximum - top), 0)
        tl.store(entropy_ptr + row, log_total - row_moment / row_total)
        # The last column where a row holds nan, and no lane has the maximum.
        first = tl.min(tl.where(maximum == top, best, vocabulary - 1), 0)
        near = first + tl.arange(0, GROUP)
        x_near = tl.load(logits_ptr + near, mask=near < vocabulary, other=0.0).to(tl.float32)
        z_near = _logits(x_near, inner_high, inner_low, outer_high, outer_low, INNER, TANH, OUTER)
        first += tl.argmax(tl.where(near < vocabulary, z_near, float("-inf")), 0)
        tl.store(argmax_ptr + row, first.to(tl.int64))
        tl.debug_barrier()  # before any thread overwrites the logits that others have just read once more
        if ignored:
            _write_zeros(logits_ptr, losses_ptr, logits_stride, WRITE_GRAD, BLOCK)
            return

    weight_sum = vocabulary * 1.0
    if class_weight_sum_ptr is not None:
        weight_sum = tl.load(class_weight_sum_ptr)
    if losses_ptr is not None:
        loss = nll_share * nll
        if SMOOTHING:
            loss += smooth_share * (weight_sum * (log_total + (top - anchor)) - tl.sum(distances, 0))
        tl.store(losses_ptr, loss)

    if WRITE_GRAD:
        slope = nll_share
        if SMOOTHING:
            slope += smooth_share * weight_sum
        scale = 1.0
        if grad_output_ptr is not None:
            scale = tl.load(grad_output_ptr + row * grad_output_stride).to(tl.float32)
        if divisor_ptr is not None:
            scale = scale / tl.load(divisor_ptr)
        slope = slope / row_total * scale
        smooth_share = smooth_share * scale
        # Backwards: what the first pass read last is the likeliest to be in the L2 cache.
        for done in range(0, whole + 1, BLOCK):
            columns = whole - done + lanes
            mask = columns < logits_stride
            x = tl.load(logits_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            d = _grad_logits(
                x, columns, top, slope, smooth_share, class_weight_ptr, vocabulary,
                inner_high, inner_low, outer_high, outer_low, slope_high, slope_low, None,
                INNER, TANH, OUTER, SLOPE, SMOOTHING,
            )  # fmt: skip
            tl.store(logits_ptr + columns, d.to(dtype), mask=mask, eviction_policy="evict_first")
        # The target's element once more, alone: a comparison for every element would cost as much as its exponential.
        d_target = _grad_logits(
            x_target, label, top, slope, smooth_share, class_weight_ptr, vocabulary,
            inner_high, inner_low, outer_high, outer_low, slope_high, slope_low, nll_share * scale,
            INNER, TANH, OUTER, SLOPE, SMOOTHING,
        )  # fmt: skip
        tl.debug_barrier()  # after other threads' stores to the same elements
        tl.store(logits_ptr + label, d_target.to(dtype))
        for start in range(vocabulary, logits_stride, PADDING):
            padding = start + tl.arange(0, PADDING)
            tl.store(logits_ptr + padding, tl.zeros([PADDING], dtype), mask=padding < logits_stride)
