"""Linear + cross-entropy: the loss of ``epilogue(hidden @ weight.T + bias)``, whose logits never exist as a whole.

The product may have a low-rank term, as a head with a LoRA adapter has: ``+ scaling * u @ b.T``. There u [N, r] is
``dropout(hidden) @ A.T``, which the caller computes: A's gradient, the mask and its share of hidden's are autograd's.

For row i with logits z (after the epilogue), label y, class weights w, V classes, smoothing s and
lse = log sum_v exp(z_v),

    loss_i = (1 - s) w_y (lse - z_y) + s / V sum_v w_v (lse - z_v) + z_loss lse^2
    p_v    = exp(z_v - lse)
    dz_v   = p_v ((1 - s) w_y + s / V sum_u w_u + 2 z_loss lse) - s / V w_v - [v = y] (1 - s) w_y

and zero in both where the label is ``ignore_index``. ``mean`` divides by sum_i w_y of the rows that count. Sources: the
definition in the documentation of ``torch.nn.CrossEntropyLoss``; the z-loss of Chowdhery et al., "PaLM", 2022.

The pipeline. Rows are taken in chunks, and one buffer of [chunk, V] serves all of them:

    logits = hidden[chunk] @ weight.T + bias     product 1, rounded to the operands' dtype as a linear layer rounds it
    logits += scaling u[chunk] @ b.T             where there is a low-rank term; see below
    row kernel                                   lse and loss in float32; overwrites the logits with d logits
    d hidden[chunk] = d logits @ weight          product 2, where hidden needs a gradient
    d weight += d logits.T @ hidden[chunk]       product 3, where the weight needs one; accumulated in float32
    d bias += d logits summed over the rows      where the bias needs one; accumulated in float32
    d u[chunk] = scaling d logits @ b            where u needs one
    d b += scaling d logits.T @ u[chunk]         where b needs one; accumulated in float32

Of a low-rank term in the operands' dtype the product is made first, and product 1 is added to it in float32: one
rounding less. One in another dtype (float32 adapters on a bfloat16 head, outside autocast) is multiplied in its own, as
PEFT does, from and to a scratch of that dtype that holds a quarter of the chunk's rows.

Gradients are computed *ahead*, in the forward, wherever that is exact, and scaled by the upstream gradient in the
backward: logits are computed once. They are kept unrounded in float32, because a bfloat16 gradient multiplied by, say,
1 / num_items would be rounded twice. They are computed in the backward instead, from logits made again (one more
product, nothing but the inputs kept), where the forward cannot know what the rounding of d logits must see:

    reduction "none"    each row has an upstream gradient of its own;
    float16             the upstream gradient (a loss scale) decides which d logits underflow or overflow;
    bfloat16 where the device's matrix product cannot return float32 (CPUs, CUDA before torch 2.8);
    a low-rank term in another 16-bit dtype than the logits', to which d logits are rounded once more.

Ahead, d logits round to bfloat16 after the division by ``mean``'s divisor, as those of the unfused loss do. For ``sum``
they round undivided, whatever count the caller divides by: bfloat16 has float32's range, and rows of one kind (all p
near 1 / V, or near 0 and 1) share their rounding error, which is none for 1 and for powers of two, unlike 1 / count.
For the same reason the epilogue's constant factor is left to the backward, where it multiplies in float32.

Cost for N rows, H features, V classes, e bytes an element, c chunks: 2 N H V flops a product (one for the loss alone,
two with a frozen head, three with a trainable one; one more where the gradients are not computed ahead). Traffic beyond
the operands: the chunk buffer is written by product 1, read by the row kernel (its second pass mostly from L2), written
by it and read by products 2 and 3: N V e bytes each; d weight is read and written c times, 8 H V bytes each. Memory
beyond inputs and gradients: the chunk buffer (``chunk_bytes``), 4 N H bytes where the gradient of hidden is kept in
float32, 4 H V for a weight that is not float32.

A low-rank term of rank r adds three products of 2 N r V flops, which the traffic bounds: the chunk buffer is written
and read once more before the row kernel and read twice after it, N V e bytes each, and d b is read and written c times,
8 r V bytes each. In a dtype of its own of f bytes, the scratch is written and read before and after the row kernel
instead: 5 N V f + 3 N V e bytes. Memory: 4 r (N + V) bytes for the gradients that are kept in float32, and the scratch:
a quarter of ``chunk_bytes``, times f / e.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.cross_entropy import (
    Epilogue,
    EpilogueStep,
    Primitives,
    RowStatistics,
    Terms,
    TorchPrimitives,
    Upstream,
    compose,
    loss_arithmetic,
    slice_statistics,
    slice_upstream,
    times,
)
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.kernels.products import accumulate, product, returns_float32

Reduction = Literal["mean", "sum", "none"]
# Rows of the chunk buffer start at multiples of this many elements, 128 bytes in bfloat16: matrix products and 16-byte
# loads stay aligned for every vocabulary (Llama's 128256 needs no padding, 65537 does). Not so with a bias: see _sweep.
_ROW_ALIGNMENT = 64
# Chunks are multiples of the height of matrix products' larger tiles, so that no product ends in a partial tile but the
# last. H200, 16384 x 896 x 151936 with a frozen head: 1.23 times the bare products in chunks of 1536 rows, 1.28 of 1664
# (a multiple of 128), 1.27 of 1728 (of 192).
_CHUNK_ALIGNMENT = 256
# A low-rank term in a dtype of its own takes one of so many parts of the chunk's rows at a time: its float32 scratch is
# half as large as a bfloat16 chunk.
_SCRATCH_SHARE = 4


class _Options(NamedTuple):
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    epilogue: Epilogue
    max_valid: int | None
    chunk_bytes: int
    grad_enabled: bool
    scaling: float


class LowRank(NamedTuple):
    """What ``scaling * u @ b.T`` adds to the logits.

    Attributes:
        u: [N, r], floating, any strides.
        b: [V, r] of u's dtype.
        scaling: its factor.
    """

    u: torch.Tensor
    b: torch.Tensor
    scaling: float


class _Rows(NamedTuple):
    """The rows that take part: all of ``hidden`` and ``u``, or those that ``keep`` [rows] names; ``labels`` [rows] are
    theirs.

    Where fewer rows count than there was room for, ``keep`` names a row behind the last, whose label is ignored.
    """

    hidden: torch.Tensor
    u: torch.Tensor | None
    labels: torch.Tensor
    keep: torch.Tensor | None

    def chunk(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of hidden and of u."""
        if self.keep is None:
            return self.hidden[start:stop], None if self.u is None else self.u[start:stop]
        kept = self.keep[start:stop].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, kept), None if self.u is None else self.u.index_select(0, kept)


class _Head(NamedTuple):
    """What a sweep over the chunks needs besides its rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float
    terms: Terms
    chunk_bytes: int
    primitives: Primitives


class _Gradients(NamedTuple):
    """Of the operands, in the order in which the Function takes them."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    u: torch.Tensor | None
    b: torch.Tensor | None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    epilogue: Sequence[EpilogueStep] = (),
    max_valid: int | None = None,
    chunk_bytes: int = 512 * 2**20,
    statistics: RowStatistics | None = None,
    backend: Backend = "torch",
) -> torch.Tensor:
    """``F.cross_entropy(epilogue(F.linear(hidden, weight, bias)), labels, ...)``, a chunk of logits at a time.

    Args:
        hidden: [N, H], floating, any strides. Logits are rounded to its dtype. Under autocast the caller casts the
            operands.
        weight: [V, H] of hidden's dtype.
        labels: [N] int64, not shifted here; each in [0, V) or ``ignore_index``.
        bias: [V] of hidden's dtype, or None.
        low_rank: what is added to the product before the epilogue, or None. In hidden's dtype or another; float64 only
            with hidden in float64.
        ignore_index: label of the rows that give no loss and exactly zero gradient.
        reduction: "mean" (over counted rows, weighted by their class weight as torch does), "sum" or "none".
        label_smoothing: in [0, 1].
        class_weight: [V] floating or None; gets no gradient.
        z_loss: factor of lse^2, which is added to a row's loss (not multiplied by its class weight) and reduced with
            it.
        epilogue: the elementwise steps between the product and the loss, in order, with at most one tanh. Computed in
            float32 without rounding in between.
        max_valid: an upper bound for the number of labels that are not ``ignore_index``, where the caller knows one: so
            many rows take part in the products, the others in none. Counting here would wait for the device. Where more
            labels count, loss and gradients are nan; on a CPU a ValueError.
        chunk_bytes: budget of the logits buffer; below one row it is one row. The result does not depend on it beyond
            the order in which float32 sums are taken.
        statistics: [N] each, to be written: what every row's softmax says beside the loss, of the ignored rows too, all
            of which then take part. Costs nothing but the writing.
        backend: who computes the rows, "torch" or "triton". float64 is always computed by torch.

    Returns:
        A scalar, or [N] for "none", in the dtype of the logits after the epilogue. With all labels ignored it is nan
        for "mean" and 0 for the others, and the gradients are zero, also where the upstream gradient is inf or nan.
        Differentiable once.

    Raises:
        TypeError: operands of unequal dtype, labels that are not int64, a class weight that is not floating, a low-rank
            term of unequal dtypes or of float64 beside other operands.
        ValueError: shapes that do not fit, an empty vocabulary, an option out of its range, an epilogue with two tanh,
            on a CPU a ``max_valid`` that is too small.
        IndexError: on a CPU, a label out of range. On CUDA a device-side assertion, as without fusion.
    """
    _check(hidden, weight, labels, bias, class_weight, reduction, label_smoothing, chunk_bytes)
    if low_rank is not None:
        _check_low_rank(low_rank, hidden, weight)
    u, b, scaling = low_rank or (None, None, 1.0)
    options = _Options(
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        compose(epilogue, hidden.dtype),
        max_valid if statistics is None else None,
        chunk_bytes,
        torch.is_grad_enabled(),
        scaling,
    )
    on: Backend = "torch" if loss_arithmetic(hidden.dtype) is torch.float64 else backend
    primitives = primitives_on(on, TorchPrimitives, "cross_entropy")
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden, weight, bias, u, b, labels, class_weight, statistics, options, primitives
    )
    return loss


def _check(
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


def _check_low_rank(low_rank: LowRank, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    u, b, _ = low_rank
    if u.dtype != b.dtype or not u.is_floating_point() or (u.dtype is torch.float64) > (hidden.dtype is torch.float64):
        raise TypeError(
            f"low_rank is floating and of one dtype, float64 only beside float64, got u {u.dtype}, b {b.dtype}, "
            f"hidden {hidden.dtype}"
        )
    if u.ndim != 2 or b.ndim != 2 or u.shape != (hidden.shape[0], b.shape[1]) or b.shape[0] != weight.shape[0]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (u, b, hidden, weight))
        raise ValueError(f"u [N, r] and b [V, r] do not fit hidden [N, H] and weight [V, H]: {shapes}")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        u: torch.Tensor | None,
        b: torch.Tensor | None,
        labels: torch.Tensor,
        class_weight: torch.Tensor | None,
        statistics: RowStatistics | None,
        options: _Options,
        primitives: Primitives,
    ) -> torch.Tensor:
        none = (False,) * len(_Gradients._fields)
        needed = tuple(ctx.needs_input_grad[: len(none)]) if options.grad_enabled else none
        ahead = any(needed) and options.reduction != "none" and _exact_ahead(hidden) and _keeps_d_logits(hidden, b)
        with _no_autocast(hidden.device):
            rows = _participants(hidden, u, labels, options)
            row_weight = _row_weight(rows.labels, class_weight, weight.shape[0], options.ignore_index, hidden.dtype)
            divisor = row_weight.sum() if options.reduction == "mean" else None
            losses = torch.empty_like(row_weight)
            terms = _terms(class_weight, options, row_weight.dtype)
            if ahead and _rounds(hidden.dtype):
                terms = terms._replace(slope=1.0)  # the backward multiplies by it
            head = _Head(weight, bias, b, options.scaling, terms, options.chunk_bytes, primitives)
            upstream = Upstream(None, divisor if _rounds(hidden.dtype) else None) if ahead else None
            needed_now = needed if ahead else none
            gradients = _sweep(rows, head, losses, statistics, upstream, needed_now, rounded=False)
            loss = _reduce(losses, divisor, rows.keep, labels.numel(), options)
            too_many = _too_many(labels, options)
            if too_many is not None:
                loss = loss.masked_fill(too_many, torch.nan)
        if ahead:
            ctx.save_for_backward(rows.labels, rows.keep, divisor, too_many, *gradients)
        elif any(needed):
            ctx.save_for_backward(rows.labels, rows.keep, divisor, too_many, hidden, weight, bias, u, b, class_weight)
        ctx.ahead, ctx.options, ctx.primitives = ahead, options, primitives
        ctx.dtype, ctx.num_rows = hidden.dtype, hidden.shape[0]
        ctx.low_dtype = hidden.dtype if b is None else b.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        labels, keep, divisor, too_many, *rest = ctx.saved_tensors
        if too_many is not None:
            grad_output = grad_output.masked_fill(too_many, torch.nan)
        with _no_autocast(labels.device):
            if ctx.ahead:
                gradients = _scale_ahead(_Gradients(*rest), grad_output, labels, divisor, ctx)
            else:
                gradients = _recompute(grad_output, labels, keep, divisor, rest, ctx)
            grad_hidden, grad_u = (
                gradient if gradient is None or keep is None else _put_back(gradient, keep, ctx.num_rows)
                for gradient in (gradients.hidden, gradients.u)
            )
        return grad_hidden, gradients.weight, gradients.bias, grad_u, gradients.b, None, None, None, None, None


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Operands are already of the dtype that they are to be multiplied in."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _rounds(dtype: torch.dtype) -> bool:
    """True where d logits are rounded to less than the loss's arithmetic."""
    return dtype != loss_arithmetic(dtype)


def _exact_ahead(hidden: torch.Tensor) -> bool:
    """True where the gradients may be computed before the upstream gradient is known; see the top of the file."""
    if not _rounds(hidden.dtype):
        return True
    return hidden.dtype is torch.bfloat16 and returns_float32("mm", hidden.device, hidden.dtype)


def _keeps_d_logits(hidden: torch.Tensor, b: torch.Tensor | None) -> bool:
    """False where the low-rank term's dtype rounds d logits once more, which must see the upstream gradient."""
    return b is None or b.dtype == hidden.dtype or not _rounds(b.dtype)


def _participants(hidden: torch.Tensor, u: torch.Tensor | None, labels: torch.Tensor, options: _Options) -> _Rows:
    count = labels.numel()
    if options.max_valid is None or options.max_valid >= count:
        return _Rows(hidden, u, labels, None)
    counted = labels != options.ignore_index
    rank = counted.cumsum(0) - 1
    rank = torch.where(counted & (rank < options.max_valid), rank, options.max_valid)
    keep = labels.new_full((options.max_valid + 1,), count)
    keep = keep.scatter_(0, rank, torch.arange(count, device=labels.device))[: options.max_valid]
    kept = labels.index_select(0, keep.clamp(max=count - 1)).masked_fill(keep == count, options.ignore_index)
    return _Rows(hidden, u, kept, keep)


def _put_back(kept: torch.Tensor, keep: torch.Tensor, count: int) -> torch.Tensor:
    """``kept`` [rows, ...] where ``keep`` says, in [count, ...] of zeros; what lies behind ``count`` is dropped."""
    return kept.new_zeros(count + 1, *kept.shape[1:]).index_copy_(0, keep, kept)[:count]


def _too_many(labels: torch.Tensor, options: _Options) -> torch.Tensor | None:
    """Whether more labels count than ``max_valid``, 0-d; None where they cannot. Raises on a CPU, where it is free."""
    if options.max_valid is None or options.max_valid >= labels.numel():
        return None
    found = (labels != options.ignore_index).sum()
    if labels.device.type == "cpu" and found > options.max_valid:
        raise ValueError(f"max_valid is {options.max_valid}, and {found.item()} labels are not {options.ignore_index}")
    return found > options.max_valid


def _row_weight(
    labels: torch.Tensor, class_weight: torch.Tensor | None, vocabulary: int, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Each row's class weight, 0 where it is ignored."""
    counted = labels != ignore_index
    _check_labels(labels, counted, vocabulary)
    if class_weight is None:
        return counted.to(loss_arithmetic(dtype))
    chosen = class_weight.to(loss_arithmetic(dtype))[labels.clamp(0, vocabulary - 1)]
    return torch.where(counted, chosen, 0.0)


def _check_labels(labels: torch.Tensor, counted: torch.Tensor, vocabulary: int) -> None:
    """Raises what ``F.cross_entropy`` does for a label out of range: on a CPU IndexError, on a GPU an assertion."""
    valid = (labels >= 0) & (labels < vocabulary) | ~counted
    if labels.device.type != "cpu":
        torch._assert_async(valid.all(), "linear_cross_entropy: a label is out of the range of the vocabulary")
    elif not valid.all():
        raise IndexError(f"Target {labels[~valid][0].item()} is out of bounds.")


def _terms(class_weight: torch.Tensor | None, options: _Options, arithmetic: torch.dtype) -> Terms:
    if class_weight is not None:
        class_weight = class_weight.to(arithmetic).contiguous()
    smoothed = options.label_smoothing and class_weight is not None
    return Terms(
        options.ignore_index,
        options.label_smoothing,
        options.z_loss,
        options.epilogue,
        options.epilogue.inner * options.epilogue.outer,
        class_weight,
        class_weight.sum() if smoothed and class_weight is not None else None,
    )


def chunk_rows(vocabulary: int, element_size: int, chunk_bytes: int) -> int:
    """Rows a chunk: as many as the budget holds.

    The default budget of 512 MiB holds 2048 rows of 131072 bfloat16 logits, enough for products at full speed. The last
    chunk is what is left. Chunks of equal size, so that none is small, were slower: 3209 rows of 128256 logits took
    10.4 ms as 2048 and 1161 rows, 10.7 as 1792 and 1417, 11.2 as 1664 and 1545 (H200, 4096 features).
    """
    most = max(1, chunk_bytes // (_aligned(vocabulary, _ROW_ALIGNMENT) * element_size))
    return most if most < _CHUNK_ALIGNMENT else most - most % _CHUNK_ALIGNMENT


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _sweep(
    rows: _Rows,
    head: _Head,
    losses: torch.Tensor | None,
    statistics: RowStatistics | None,
    upstream: Upstream | None,
    needed: tuple[bool, ...],
    rounded: bool,
) -> _Gradients:
    """One pass over the chunks: what is asked for, and those of the ``_Gradients`` that are ``needed``.

    Those of the weight, the bias and b are in the loss's arithmetic; those of rows, hidden and u, in their operand's
    dtype where ``rounded``, else in the loss's arithmetic too.
    """
    weight, count = head.weight, rows.labels.shape[0]
    vocabulary = weight.shape[0]
    arithmetic = loss_arithmetic(weight.dtype)

    def of_rows(operand: torch.Tensor) -> torch.Tensor:
        dtype = operand.dtype if rounded else loss_arithmetic(operand.dtype)
        return operand.new_empty(count, operand.shape[1], dtype=dtype)

    def summed(operand: torch.Tensor) -> torch.Tensor:
        # The first chunk overwrites it; where there is no chunk it must be zero all the same.
        new = operand.new_empty if count else operand.new_zeros
        return new(operand.shape, dtype=loss_arithmetic(operand.dtype))

    grad_hidden = of_rows(rows.hidden) if needed[0] else None
    grad_weight = summed(weight) if needed[1] else None
    grad_bias = weight.new_zeros(vocabulary, dtype=arithmetic) if needed[2] else None
    grad_u = of_rows(rows.u) if rows.u is not None and needed[3] else None
    grad_b = summed(head.b) if head.b is not None and needed[4] else None

    step = chunk_rows(vocabulary, weight.element_size(), head.chunk_bytes)
    # With a bias the rows are dense: on CUDA addmm adds a bias before the rounding, as F.linear does, only into a dense
    # tensor. Into padded rows the product is rounded first (H200, torch 2.11: twice stock's error in d bias).
    pitch = _aligned(vocabulary, _ROW_ALIGNMENT) if head.bias is None else vocabulary
    buffer = weight.new_empty(min(step, count), pitch)[:, :vocabulary]
    scratch = _scratch(buffer, head)
    for start in range(0, count, step):
        stop = min(start + step, count)
        (chunk, low), labels, logits = rows.chunk(start, stop), rows.labels[start:stop], buffer[: stop - start]
        _project(chunk, low, head, scratch, logits)
        row_losses = None if losses is None else losses[start:stop]
        row_statistics = None if statistics is None else slice_statistics(statistics, start, stop)
        head.primitives.cross_entropy_rows(
            logits, labels, row_losses, head.terms, slice_upstream(upstream, start, stop), row_statistics
        )
        if grad_hidden is not None:
            product(logits, weight, grad_hidden[start:stop])
        if grad_weight is not None:
            accumulate(grad_weight, logits.t(), chunk, first=start == 0)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=arithmetic)
        if low is not None and (grad_u is not None or grad_b is not None):
            rows_of_u = None if grad_u is None else grad_u[start:stop]
            _low_rank_gradients(logits, low, head, scratch, rows_of_u, grad_b, first=start == 0)
    if grad_b is not None:
        grad_b *= head.scaling
    return _Gradients(grad_hidden, grad_weight, grad_bias, grad_u, grad_b)


def _scratch(buffer: torch.Tensor, head: _Head) -> torch.Tensor | None:
    """Rows of logits in the low-rank term's dtype; None where that is the logits' own."""
    if head.b is None or head.b.dtype == buffer.dtype:
        return None
    return head.b.new_empty(-(-buffer.shape[0] // _SCRATCH_SHARE), buffer.shape[1])


def _project(
    chunk: torch.Tensor, low: torch.Tensor | None, head: _Head, scratch: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Logits of ``chunk`` [rows, H], and ``low`` [rows, r] of u, into ``out`` [rows, V]."""
    if low is not None and head.b is not None and scratch is None:
        if head.bias is None:
            product(low, head.b.t(), out, head.scaling)
        else:
            torch.addmm(head.bias, low, head.b.t(), alpha=head.scaling, out=out)
        torch.addmm(out, chunk, head.weight.t(), out=out)
        return
    if head.bias is None:
        torch.mm(chunk, head.weight.t(), out=out)
    else:
        torch.addmm(head.bias, chunk, head.weight.t(), out=out)
    if low is not None and head.b is not None and scratch is not None:
        for part, low_part in zip(out.split(len(scratch)), low.split(len(scratch)), strict=True):
            term = scratch[: len(part)]
            product(low_part, head.b.t(), term, head.scaling)
            part += term


def _low_rank_gradients(
    d_logits: torch.Tensor,
    low: torch.Tensor,
    head: _Head,
    scratch: torch.Tensor | None,
    grad_u: torch.Tensor | None,
    grad_b: torch.Tensor | None,
    first: bool,
) -> None:
    """Writes the chunk's d u, and adds its d b without the scaling, for the ``first`` chunk in place of what is there.

    ``low`` and ``grad_u`` are the chunk's rows [rows, r].
    """
    assert head.b is not None  # it comes with low
    size = len(d_logits) if scratch is None else len(scratch)
    for start in range(0, len(d_logits), size):
        part = d_logits[start : start + size]
        if scratch is not None:
            part = scratch[: len(part)].copy_(part)
        if grad_u is not None:
            product(part, head.b, grad_u[start : start + size], head.scaling)
        if grad_b is not None:
            accumulate(grad_b, part.t(), low[start : start + size], first=first and start == 0)


def _reduce(
    losses: torch.Tensor,
    divisor: torch.Tensor | None,
    keep: torch.Tensor | None,
    count: int,
    options: _Options,
) -> torch.Tensor:
    if options.reduction == "none":
        loss = losses if keep is None else _put_back(losses, keep, count)
    else:
        loss = losses.sum()
        if divisor is not None:
            loss = loss / divisor
    return loss.to(options.epilogue.dtype)


def _scale_ahead(
    ahead: _Gradients, grad_output: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor | None, ctx: Any
) -> _Gradients:
    """The forward's gradients times the upstream gradient; one rounding, to the operands' dtype, and out of place."""
    options: _Options = ctx.options
    arithmetic = loss_arithmetic(ctx.dtype)
    factor = grad_output.to(arithmetic)
    if _rounds(ctx.dtype):
        factor = times(factor, options.epilogue.inner * options.epilogue.outer)
    elif divisor is not None:
        factor = factor / divisor  # where d logits were rounded they were divided before
    # Loss / num_items with no item has an upstream gradient of inf, and a row without loss a gradient of 0 all the
    # same.
    counted = labels != options.ignore_index
    of_rows = torch.where(counted, factor, 0.0) if ahead.hidden is not None or ahead.u is not None else factor
    factor = torch.where(counted.any(), factor, 0.0)

    def scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        if gradient is None:
            return None
        out = torch.empty_like(gradient, dtype=dtype)
        ctx.primitives.scale(gradient, factor.to(gradient.dtype), out)
        return out

    return _Gradients(
        scaled(ahead.hidden, of_rows, ctx.dtype),
        scaled(ahead.weight, factor, ctx.dtype),
        scaled(ahead.bias, factor, ctx.dtype),
        scaled(ahead.u, of_rows, ctx.low_dtype),
        scaled(ahead.b, factor, ctx.low_dtype),
    )


def _recompute(
    grad_output: torch.Tensor,
    labels: torch.Tensor,
    keep: torch.Tensor | None,
    divisor: torch.Tensor | None,
    operands: Sequence[Any],
    ctx: Any,
) -> _Gradients:
    """The gradients from logits made once more, each rounded as those of the unfused loss are."""
    hidden, weight, bias, u, b, class_weight = operands
    options: _Options = ctx.options
    grad = grad_output
    if keep is not None and grad.ndim:
        grad = grad.index_select(0, keep.clamp(max=grad.shape[0] - 1))
    terms = _terms(class_weight, options, loss_arithmetic(hidden.dtype))
    head = _Head(weight, bias, b, options.scaling, terms, options.chunk_bytes, ctx.primitives)
    rows = _Rows(hidden, u, labels, keep)
    needed = ctx.needs_input_grad[: len(_Gradients._fields)]
    gradients = _sweep(rows, head, None, None, Upstream(grad, divisor), needed, rounded=True)
    of_head, of_term = gradients[:3], gradients[3:]
    return _Gradients(
        *(None if gradient is None else gradient.to(ctx.dtype) for gradient in of_head),
        *(None if gradient is None else gradient.to(ctx.low_dtype) for gradient in of_term),
    )
