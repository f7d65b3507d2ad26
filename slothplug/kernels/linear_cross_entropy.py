"""Linear + cross-entropy: the loss of ``epilogue(hidden @ weight.T + bias)`` without the whole matrix of logits.

The product may have a low-rank term, as a head with a LoRA adapter has: ``+ scaling * u @ b.T``. There u [N, r] is
``dropout(hidden) @ A.T``, which the caller computes: autograd differentiates A, the mask and their share of hidden.

For row i with logits z (after the epilogue), label y, class weights w, V classes, smoothing s and
lse = log sum_v exp(z_v),

    loss_i = (1 - s) w_y (lse - z_y) + s / V sum_v w_v (lse - z_v)
    p_v    = exp(z_v - lse)
    dz_v   = p_v ((1 - s) w_y + s / V sum_u w_u) - s / V w_v - [v = y] (1 - s) w_y

and zero in both where the label is ``ignore_index``. ``mean`` divides by sum_i w_y of the valid rows. Source: the
definition in the documentation of ``torch.nn.CrossEntropyLoss``.

The pipeline. Rows are taken in chunks, and one buffer of [chunk, V] serves all of them (``logit_chunks.py``):

    logits = hidden[chunk] @ weight.T + bias         product 1, rounded to the operands' dtype as a linear layer does
    logits += scaling u[chunk] @ b.T                 where there is a low-rank term; see below
    row kernel                                       lse and loss in float32; overwrites logits with their gradient
    grad_hidden[chunk] = grad_logits @ weight        product 2, where hidden needs a gradient
    grad_weight += grad_logits.T @ hidden[chunk]     product 3, where weight needs one; accumulated in float32
    grad_bias += sum of grad_logits over the rows    where bias needs one; accumulated in float32
    grad_u[chunk] = scaling grad_logits @ b          where u needs one
    grad_b += scaling grad_logits.T @ u[chunk]       where b needs one; accumulated in float32

With a low-rank term in the operands' dtype, the term's product is computed first, and product 1 is added to it in
float32: one rounding less. A term in another dtype (float32 adapters on a bfloat16 head, outside autocast) is
multiplied in its own dtype, as PEFT does, in a scratch of that dtype for a quarter of the chunk's rows.

Gradients are computed in the forward wherever that is exact, and the backward multiplies them by the upstream gradient:
logits are computed once. These gradients are kept unrounded in float32, because a bfloat16 gradient multiplied by, say,
1 / num_items_in_batch would be rounded twice. Gradients are computed in the backward, from recomputed logits (one more
product, nothing but the inputs saved), where the rounding of grad_logits must see the upstream gradient:

    reduction "none"    each row has an upstream gradient of its own;
    float16             the upstream gradient (a loss scale) decides which grad_logits underflow or overflow;
    bfloat16 where the device's matrix product cannot return float32 (CPUs, CUDA before torch 2.8);
    a low-rank term in another 16-bit dtype than the logits', to which grad_logits are rounded once more.

In the forward, grad_logits round to bfloat16 after the division by ``mean``'s divisor, as those of the unfused loss do.
For ``sum`` they round undivided, whatever count the caller divides by: bfloat16 has float32's range, and rows of one
kind (all p near 1 / V, or near 0 and 1) share their rounding error, which is none for 1 and for powers of two, unlike
1 / count. For the same reason the epilogue's constant factor is left to the backward, which multiplies in float32.

Cost for N rows, H features, V classes, e bytes an element, c chunks: 2 N H V flops a product (one for the loss alone,
two with a frozen head, three with a trainable one; one more where gradients are computed in the backward). Traffic
beyond the operands: the chunk buffer is written by product 1, read by the row kernel (its second pass mostly from L2),
written by it and read by products 2 and 3: N V e bytes each; grad_weight is read and written c times, 8 H V bytes each.
Memory beyond inputs and gradients: the chunk buffer (``chunk_bytes``), 4 N H bytes where the gradient of hidden is kept
in float32, 4 H V for a weight that is not float32.

A low-rank term of rank r adds three products of 2 N r V flops, which the traffic bounds: the chunk buffer is written
and read once more before the row kernel and read twice after it, N V e bytes each, and grad_b is read and written c
times, 8 r V bytes each. In a dtype of its own of f bytes, the scratch is written and read before and after the row
kernel instead: 5 N V f + 3 N V e bytes. Memory: 4 r (N + V) bytes for the gradients that are kept in float32, and the
scratch: a quarter of ``chunk_bytes``, times f / e.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import (
    Epilogue,
    EpilogueStep,
    LossSpec,
    Primitives,
    RowStatistics,
    Upstream,
    compose,
    loss_arithmetic,
    primitives,
    times,
)
from slothplug.kernels.logit_chunks import Gradients, Head, sweep
from slothplug.kernels.loss_arguments import check_arguments, check_low_rank, check_statistics
from slothplug.kernels.matmul import can_widen
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.kernels.valid_rows import Rows, exceeds_bound, scatter_rows, select_rows, weigh_rows

Reduction = Literal["mean", "sum", "none"]


class _Options(NamedTuple):
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    epilogue: Epilogue
    max_valid: int | None
    chunk_bytes: int
    grad_enabled: bool
    scaling: float


class LowRank(NamedTuple):
    """The low-rank term ``scaling * u @ b.T`` of the logits.

    Attributes:
        u: [N, r], floating, any strides.
        b: [V, r] of u's dtype.
        scaling: factor of the product.
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
        labels: [N] int64, already shifted; each in [0, V) or ``ignore_index``.
        bias: [V] of hidden's dtype, or None.
        low_rank: added to the product before the epilogue, or None. In hidden's dtype or another; float64 only with
            hidden in float64.
        ignore_index: label of the rows without loss and with exactly zero gradient.
        reduction: "mean" (over valid rows, weighted by their class weight as torch does), "sum" or "none".
        label_smoothing: in [0, 1].
        class_weight: [V] floating or None; gets no gradient.
        epilogue: the elementwise steps between the product and the loss, in order, with at most one tanh. Computed in
            float32 without rounding in between.
        max_valid: an upper bound for the number of labels that are not ``ignore_index``, where the caller knows one:
            the number of rows that take part in the products. Counting here would wait for the device. Where more
            labels are valid, loss and gradients are nan; on a CPU it is a ValueError.
        chunk_bytes: budget of the logits buffer; below one row it is one row. The result does not depend on it beyond
            the order in which float32 sums are taken.
        statistics: [N] each, contiguous, on hidden's device; written with every row's entropy and argmax. Every row
            then takes part in the products, ignored ones too, whatever ``max_valid`` is.
        backend: of the row kernel, "torch" or "triton". float64 is always computed by torch.

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
        compose(epilogue, hidden.dtype),
        max_valid if statistics is None else None,
        chunk_bytes,
        torch.is_grad_enabled(),
        scaling,
    )
    on: Backend = "torch" if loss_arithmetic(hidden.dtype) is torch.float64 else backend
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden, weight, bias, u, b, labels, class_weight, statistics, options, primitives(on)
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
        primitives: type[Primitives],
    ) -> torch.Tensor:
        none = (False,) * len(Gradients._fields)
        needed = tuple(ctx.needs_input_grad[: len(none)]) if options.grad_enabled else none
        in_forward = any(needed) and options.reduction != "none" and _exact_in_forward(hidden, b)
        with _no_autocast(hidden.device):
            rows = select_rows(hidden, u, labels, options.ignore_index, options.max_valid)
            row_weight = weigh_rows(rows.labels, class_weight, weight.shape[0], options.ignore_index, hidden.dtype)
            divisor = row_weight.sum() if options.reduction == "mean" else None
            losses = torch.empty_like(row_weight)
            spec = _loss_spec(class_weight, options, row_weight.dtype)
            if in_forward and _rounds(hidden.dtype):
                spec = spec._replace(slope=1.0)  # the backward multiplies by it
            head = Head(weight, bias, b, options.scaling, spec, primitives)
            upstream = Upstream(None, divisor if _rounds(hidden.dtype) else None) if in_forward else None
            needed_now = needed if in_forward else none
            gradients = sweep(rows, head, options.chunk_bytes, losses, statistics, upstream, needed_now, rounded=False)
            loss = _reduce(losses, divisor, rows.indices, labels.numel(), options)
            too_many = exceeds_bound(labels, options.ignore_index, options.max_valid)
            if too_many is not None:
                loss = loss.masked_fill(too_many, torch.nan)
        if in_forward:
            ctx.save_for_backward(rows.labels, rows.indices, divisor, too_many, *gradients)
        elif any(needed):
            operands = (hidden, weight, bias, u, b, class_weight)
            ctx.save_for_backward(rows.labels, rows.indices, divisor, too_many, *operands)
        ctx.in_forward, ctx.options, ctx.primitives = in_forward, options, primitives
        ctx.dtype, ctx.num_rows = hidden.dtype, hidden.shape[0]
        ctx.low_dtype = hidden.dtype if b is None else b.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        labels, indices, divisor, too_many, *rest = ctx.saved_tensors
        if too_many is not None:
            grad_output = grad_output.masked_fill(too_many, torch.nan)
        with _no_autocast(labels.device):
            if ctx.in_forward:
                gradients = _scale(Gradients(*rest), grad_output, labels, divisor, ctx)
            else:
                gradients = _recompute(grad_output, labels, indices, divisor, rest, ctx)
            grad_hidden, grad_u = (
                gradient if gradient is None or indices is None else scatter_rows(gradient, indices, ctx.num_rows)
                for gradient in (gradients.hidden, gradients.u)
            )
        return grad_hidden, gradients.weight, gradients.bias, grad_u, gradients.b, None, None, None, None, None


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The operands have the dtype of the products already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _rounds(dtype: torch.dtype) -> bool:
    """True where the gradients of logits of ``dtype`` are rounded to less than the loss's arithmetic."""
    return dtype != loss_arithmetic(dtype)


def _exact_in_forward(hidden: torch.Tensor, b: torch.Tensor | None) -> bool:
    """True where gradients may be computed before the upstream gradient is known; see the top of the file."""
    if b is not None and b.dtype != hidden.dtype and _rounds(b.dtype):
        return False
    if not _rounds(hidden.dtype):
        return True
    return hidden.dtype is torch.bfloat16 and can_widen(hidden.device.type, hidden.dtype)


def _loss_spec(class_weight: torch.Tensor | None, options: _Options, arithmetic: torch.dtype) -> LossSpec:
    if class_weight is not None:
        class_weight = class_weight.to(arithmetic).contiguous()
    smoothed = options.label_smoothing and class_weight is not None
    return LossSpec(
        options.ignore_index,
        options.label_smoothing,
        options.epilogue,
        options.epilogue.inner * options.epilogue.outer,
        class_weight,
        class_weight.sum() if smoothed and class_weight is not None else None,
    )


def _reduce(
    losses: torch.Tensor,
    divisor: torch.Tensor | None,
    indices: torch.Tensor | None,
    count: int,
    options: _Options,
) -> torch.Tensor:
    if options.reduction == "none":
        loss = losses if indices is None else scatter_rows(losses, indices, count)
    else:
        loss = losses.sum()
        if divisor is not None:
            loss = loss / divisor
    return loss.to(options.epilogue.dtype)


def _scale(
    gradients: Gradients, grad_output: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor | None, ctx: Any
) -> Gradients:
    """The forward's gradients times the upstream gradient; one rounding, to the operands' dtype, and out of place."""
    options: _Options = ctx.options
    arithmetic = loss_arithmetic(ctx.dtype)
    factor = grad_output.to(arithmetic)
    if _rounds(ctx.dtype):
        factor = times(factor, options.epilogue.inner * options.epilogue.outer)
    elif divisor is not None:
        factor = factor / divisor  # gradients that were rounded were divided before
    # Loss / num_items_in_batch without an item has an upstream gradient of inf; a row without loss has a gradient of 0
    # all the same.
    valid = labels != options.ignore_index
    of_rows = torch.where(valid, factor, 0.0) if gradients.hidden is not None or gradients.u is not None else factor
    factor = torch.where(valid.any(), factor, 0.0)

    def scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        if gradient is None:
            return None
        out = torch.empty_like(gradient, dtype=dtype)
        ctx.primitives.scale(gradient, factor.to(gradient.dtype), out)
        return out

    return Gradients(
        scaled(gradients.hidden, of_rows, ctx.dtype),
        scaled(gradients.weight, factor, ctx.dtype),
        scaled(gradients.bias, factor, ctx.dtype),
        scaled(gradients.u, of_rows, ctx.low_dtype),
        scaled(gradients.b, factor, ctx.low_dtype),
    )


def _recompute(
    grad_output: torch.Tensor,
    labels: torch.Tensor,
    indices: torch.Tensor | None,
    divisor: torch.Tensor | None,
    operands: Sequence[Any],
    ctx: Any,
) -> Gradients:
    """The gradients from recomputed logits, each rounded as those of the unfused loss are."""
    hidden, weight, bias, u, b, class_weight = operands
    options: _Options = ctx.options
    if indices is not None and grad_output.ndim:
        grad_output = grad_output.index_select(0, indices.clamp(max=grad_output.shape[0] - 1))
    spec = _loss_spec(class_weight, options, loss_arithmetic(hidden.dtype))
    head = Head(weight, bias, b, options.scaling, spec, ctx.primitives)
    needed = ctx.needs_input_grad[: len(Gradients._fields)]
    upstream = Upstream(grad_output, divisor)
    rows = Rows(hidden, u, labels, indices)
    gradients = sweep(rows, head, options.chunk_bytes, None, None, upstream, needed, rounded=True)
    of_head, of_term = gradients[:3], gradients[3:]
    return Gradients(
        *(None if gradient is None else gradient.to(ctx.dtype) for gradient in of_head),
        *(None if gradient is None else gradient.to(ctx.low_dtype) for gradient in of_term),
    )
