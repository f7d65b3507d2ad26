"""The pass over the chunks of logits: losses, statistics and gradients. Formulas, costs: linear_cross_entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slothplug.kernels.counted_rows import Rows
from slothplug.kernels.cross_entropy import (
    Primitives,
    RowStatistics,
    Terms,
    Upstream,
    loss_arithmetic,
    slice_statistics,
    slice_upstream,
)
from slothplug.kernels.products import accumulate, product

# Rows of the chunk buffer start at multiples of this many elements, 128 bytes in bfloat16: matrix products and 16-byte
# loads stay aligned for every vocabulary (Llama's 128256 needs no padding, 65537 does). Not so with a bias: see sweep.
_ROW_ALIGNMENT = 64
# Chunks are multiples of the height of matrix products' larger tiles, so that no product ends in a partial tile but the
# last. H200, 16384 x 896 x 151936 with a frozen head: 1.23 times the bare products in chunks of 1536 rows, 1.28 of 1664
# (a multiple of 128), 1.27 of 1728 (of 192).
_CHUNK_ALIGNMENT = 256
# A low-rank term in a dtype of its own takes one of so many parts of the chunk's rows at a time: its float32 scratch is
# half as large as a bfloat16 chunk.
_SCRATCH_SHARE = 4


class Head(NamedTuple):
    """What a sweep over the chunks needs besides its rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float
    terms: Terms
    chunk_bytes: int
    primitives: Primitives


class Gradients(NamedTuple):
    """Of the operands, in the order in which the Function takes them."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    u: torch.Tensor | None
    b: torch.Tensor | None


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


def sweep(
    rows: Rows,
    head: Head,
    losses: torch.Tensor | None,
    statistics: RowStatistics | None,
    upstream: Upstream | None,
    needed: tuple[bool, ...],
    rounded: bool,
) -> Gradients:
    """One pass over the chunks: what is asked for, and those of the ``Gradients`` that are ``needed``.

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
    buffer = weight.new_empty(min(step, count), pitch)
    if pitch > vocabulary:
        buffer[:, vocabulary:].zero_()  # some products read it (see products.dense_rows); nothing else is written there
    buffer = buffer[:, :vocabulary]
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
    return Gradients(grad_hidden, grad_weight, grad_bias, grad_u, grad_b)


def _scratch(buffer: torch.Tensor, head: Head) -> torch.Tensor | None:
    """Rows of logits in the low-rank term's dtype; None where that is the logits' own."""
    if head.b is None or head.b.dtype == buffer.dtype:
        return None
    return head.b.new_empty(-(-buffer.shape[0] // _SCRATCH_SHARE), buffer.shape[1])


def _project(
    chunk: torch.Tensor, low: torch.Tensor | None, head: Head, scratch: torch.Tensor | None, out: torch.Tensor
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
    head: Head,
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
