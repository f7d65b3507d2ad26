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
from slothplug.kernels.counted_rows import Rows, exceeds_bound, put_back, select_rows, weigh_rows
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
    times,
)
from slothplug.kernels.logit_chunks import Gradients, Head, sweep
from slothplug.kernels.loss_arguments import check_arguments, check_low_rank, check_statistics
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.kernels.products import returns_float32

Reduction = Literal["mean", "sum", "none"]


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
        statistics: [N] each, contiguous, on hidden's device, to be written: what every row's softmax says beside the
            loss. Every row then takes part in the products, ignored ones too, whatever ``max_valid`` says.
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
    check_arguments(hidden, weight, labels, bias, class_weight, reduction, label_smoothing, chunk_bytes)
    if statistics is not None:
        check_statistics(statistics, hidden)
    if low_rank is not None:
        check_low_rank(low_rank.u, low_rank.b, hidden, weight)
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
        none = (False,) * len(Gradients._fields)
        needed = tuple(ctx.needs_input_grad[: len(none)]) if options.grad_enabled else none
        ahead = any(needed) and options.reduction != "none" and _exact_ahead(hidden) and _keeps_d_logits(hidden, b)
        with _no_autocast(hidden.device):
            rows = select_rows(hidden, u, labels, options.ignore_index, options.max_valid)
            row_weight = weigh_rows(rows.labels, class_weight, weight.shape[0], options.ignore_index, hidden.dtype)
            divisor = row_weight.sum() if options.reduction == "mean" else None
            losses = torch.empty_like(row_weight)
            terms = _terms(class_weight, options, row_weight.dtype)
            if ahead and _rounds(hidden.dtype):
                terms = terms._replace(slope=1.0)  # the backward multiplies by it
            head = Head(weight, bias, b, options.scaling, terms, options.chunk_bytes, primitives)
            upstream = Upstream(None, divisor if _rounds(hidden.dtype) else None) if ahead else None
            needed_now = needed if ahead else none
            gradients = sweep(rows, head, losses, statistics, upstream, needed_now, rounded=False)
            loss = _reduce(losses, divisor, rows.keep, labels.numel(), options)
            too_many = exceeds_bound(labels, options.ignore_index, options.max_valid)
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
                gradients = _scale_ahead(Gradients(*rest), grad_output, labels, divisor, ctx)
            else:
                gradients = _recompute(grad_output, labels, keep, divisor, rest, ctx)
            grad_hidden, grad_u = (
                gradient if gradient is None or keep is None else put_back(gradient, keep, ctx.num_rows)
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


def _reduce(
    losses: torch.Tensor,
    divisor: torch.Tensor | None,
    keep: torch.Tensor | None,
    count: int,
    options: _Options,
) -> torch.Tensor:
    if options.reduction == "none":
        loss = losses if keep is None else put_back(losses, keep, count)
    else:
        loss = losses.sum()
        if divisor is not None:
            loss = loss / divisor
    return loss.to(options.epilogue.dtype)


def _scale_ahead(
    ahead: Gradients, grad_output: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor | None, ctx: Any
) -> Gradients:
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

    return Gradients(
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
) -> Gradients:
    """The gradients from logits made once more, each rounded as those of the unfused loss are."""
    hidden, weight, bias, u, b, class_weight = operands
    options: _Options = ctx.options
    grad = grad_output
    if keep is not None and grad.ndim:
        grad = grad.index_select(0, keep.clamp(max=grad.shape[0] - 1))
    terms = _terms(class_weight, options, loss_arithmetic(hidden.dtype))
    head = Head(weight, bias, b, options.scaling, terms, options.chunk_bytes, ctx.primitives)
    rows = Rows(hidden, u, labels, keep)
    needed = ctx.needs_input_grad[: len(Gradients._fields)]
    gradients = sweep(rows, head, None, None, Upstream(grad, divisor), needed, rounded=True)
    of_head, of_term = gradients[:3], gradients[3:]
    return Gradients(
        *(None if gradient is None else gradient.to(ctx.dtype) for gradient in of_head),
        *(None if gradient is None else gradient.to(ctx.low_dtype) for gradient in of_term),
    )
