"""Logits a chunk of rows at a time: losses, statistics and gradients. Formulas and costs: linear_cross_entropy.

``chunk_loss`` and ``chunk_gradients`` compute one chunk in buffers of the caller's; ``sweep`` allocates the buffers and
iterates over all chunks. None of them records a graph or checks its arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slothplug.kernels.cross_entropy import (
    LossSpec,
    Primitives,
    RowStatistics,
    Upstream,
    loss_arithmetic,
    slice_statistics,
    slice_upstream,
)
from slothplug.kernels.matmul import accumulate, matmul_out
from slothplug.kernels.valid_rows import Rows

# Rows of the chunk buffer start at multiples of this many elements, 128 bytes in bfloat16: matrix products and 16-byte
# loads stay aligned for every vocabulary (Llama's 128256 needs no padding, 65537 does). With a bias: see chunk_buffer.
_ROW_ALIGNMENT = 64
# Chunks are multiples of the height of matrix products' larger tiles, so that no product ends in a partial tile but the
# last. H200, 16384 x 896 x 151936 with a frozen head: 1.23 times the bare products in chunks of 1536 rows, 1.28 of 1664
# (a multiple of 128), 1.27 of 1728 (of 192).
_CHUNK_ALIGNMENT = 256
# A low-rank term in a dtype of its own takes one of so many parts of the chunk's rows at a time: its float32 scratch is
# half as large as a bfloat16 chunk.
_SCRATCH_SHARE = 4


class Head(NamedTuple):
    """The output head and its loss: what every chunk needs besides its rows.

    Attributes:
        weight: [V, H].
        bias: [V] of weight's dtype, or None.
        b: [V, r] of the low-rank term ``scaling * u @ b.T``, or None.
        scaling: the term's factor.
        spec: the loss.
        primitives: the backend of the row kernel.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float
    spec: LossSpec
    primitives: type[Primitives]


class Gradients(NamedTuple):
    """Gradients of the operands, in the order in which the autograd Function takes them; None where not asked for.

    Those of hidden and u have one row for each row of theirs; those of weight, bias and b are sums over the rows.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    u: torch.Tensor | None
    b: torch.Tensor | None

    def chunk(self, start: int, stop: int) -> Gradients:
        """The gradients that rows ``start`` to ``stop`` write and add to."""
        hidden = None if self.hidden is None else self.hidden[start:stop]
        u = None if self.u is None else self.u[start:stop]
        return self._replace(hidden=hidden, u=u)


class ChunkBuffer(NamedTuple):
    """Scratch that all chunks share.

    Attributes:
        logits: [rows, V] of weight's dtype, a view of padded rows whose padding is zero.
        low_rank: [part of the rows, V] of b's dtype; None where that is the logits' own, or there is no b.
    """

    logits: torch.Tensor
    low_rank: torch.Tensor | None


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


def chunk_buffer(head: Head, rows: int) -> ChunkBuffer:
    """The scratch for chunks of up to ``rows`` rows."""
    vocabulary = head.weight.shape[0]
    # With a bias the rows are dense: on CUDA addmm adds a bias before the rounding, as F.linear does, only into a dense
    # tensor. Into padded rows the product is rounded first (H200, torch 2.11: twice stock's error in the bias's
    # gradient).
    pitch = _aligned(vocabulary, _ROW_ALIGNMENT) if head.bias is None else vocabulary
    logits = head.weight.new_empty(rows, pitch)
    if pitch > vocabulary:
        logits[:, vocabulary:].zero_()  # products may read it (matmul.dense_rows), and nothing else is written there
    low_rank = None
    if head.b is not None and head.b.dtype != logits.dtype:
        low_rank = head.b.new_empty(-(-rows // _SCRATCH_SHARE), vocabulary)
    return ChunkBuffer(logits[:, :vocabulary], low_rank)


def sweep(
    rows: Rows,
    head: Head,
    chunk_bytes: int,
    losses: torch.Tensor | None,
    statistics: RowStatistics | None,
    upstream: Upstream | None,
    needed: tuple[bool, ...],
    rounded: bool,
) -> Gradients:
    """One pass over the chunks: writes losses and statistics, and returns the gradients that are ``needed``.

    The sums over rows are in the loss's arithmetic. Gradients of hidden and u are in the dtype of theirs where
    ``rounded``, else in the loss's arithmetic too.
    """
    count = rows.labels.shape[0]
    gradients = _empty_gradients(rows, head, needed, rounded)
    step = chunk_rows(head.weight.shape[0], head.weight.element_size(), chunk_bytes)
    buffer = chunk_buffer(head, min(step, count))
    for start in range(0, count, step):
        stop = min(start + step, count)
        hidden, u = rows.chunk(start, stop)
        logits = chunk_loss(
            hidden,
            u,
            rows.labels[start:stop],
            head,
            buffer,
            None if losses is None else losses[start:stop],
            None if statistics is None else slice_statistics(statistics, start, stop),
            slice_upstream(upstream, start, stop),
        )
        chunk_gradients(logits, hidden, u, head, buffer, gradients.chunk(start, stop), first=start == 0)
    if gradients.b is not None:
        gradients.b.mul_(head.scaling)
    return gradients


def _empty_gradients(rows: Rows, head: Head, needed: tuple[bool, ...], rounded: bool) -> Gradients:
    count = rows.labels.shape[0]

    def of_rows(operand: torch.Tensor) -> torch.Tensor:
        dtype = operand.dtype if rounded else loss_arithmetic(operand.dtype)
        return operand.new_empty(count, operand.shape[1], dtype=dtype)

    def summed(operand: torch.Tensor) -> torch.Tensor:
        # The first chunk overwrites it; where there is no chunk it must be zero all the same.
        new = operand.new_empty if count else operand.new_zeros
        return new(operand.shape, dtype=loss_arithmetic(operand.dtype))

    return Gradients(
        of_rows(rows.hidden) if needed[0] else None,
        summed(head.weight) if needed[1] else None,
        summed(head.bias) if head.bias is not None and needed[2] else None,
        of_rows(rows.u) if rows.u is not None and needed[3] else None,
        summed(head.b) if head.b is not None and needed[4] else None,
    )


def chunk_loss(
    hidden: torch.Tensor,
    u: torch.Tensor | None,
    labels: torch.Tensor,
    head: Head,
    buffer: ChunkBuffer,
    losses: torch.Tensor | None,
    statistics: RowStatistics | None,
    upstream: Upstream | None,
) -> torch.Tensor:
    """Writes the losses [rows] and statistics of one chunk; returns its logits [rows, V] in ``buffer``.

    Where ``upstream`` is given the returned tensor holds the gradients of the logits instead. ``hidden`` [rows, H] and
    ``u`` [rows, r] are ready to be left operands (``matmul.dense_rows``); ``labels`` [rows] are in range.
    """
    logits = buffer.logits[: len(labels)]
    _project(hidden, u, head, buffer.low_rank, logits)
    head.primitives.cross_entropy_rows(logits, labels, losses, head.spec, upstream, statistics)
    return logits


def chunk_gradients(
    grad_logits: torch.Tensor,
    hidden: torch.Tensor,
    u: torch.Tensor | None,
    head: Head,
    buffer: ChunkBuffer,
    gradients: Gradients,
    first: bool,
) -> None:
    """From the logits' gradients [rows, V] of one chunk: writes those of its rows, and adds to the sums over rows.

    ``gradients`` are the destinations, those of hidden and u [rows, ...]. The ``first`` chunk overwrites the sums. The
    sum for b lacks the factor ``head.scaling``.
    """
    if gradients.hidden is not None:
        matmul_out(grad_logits, head.weight, gradients.hidden)
    if gradients.weight is not None:
        accumulate(gradients.weight, grad_logits.t(), hidden, first)
    if gradients.bias is not None:
        row_sum = grad_logits.sum(0, dtype=gradients.bias.dtype)
        gradients.bias.copy_(row_sum) if first else gradients.bias.add_(row_sum)
    if u is not None and (gradients.u is not None or gradients.b is not None):
        _low_rank_gradients(grad_logits, u, head, buffer.low_rank, gradients, first)


def _project(
    hidden: torch.Tensor, u: torch.Tensor | None, head: Head, scratch: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Writes the logits [rows, V] of ``hidden`` [rows, H] and ``u`` [rows, r] into ``out``."""
    if u is not None and head.b is not None and scratch is None:
        if head.bias is None:
            matmul_out(u, head.b.t(), out, head.scaling)
        else:
            torch.addmm(head.bias, u, head.b.t(), alpha=head.scaling, out=out)
        torch.addmm(out, hidden, head.weight.t(), out=out)
        return
    if head.bias is None:
        torch.mm(hidden, head.weight.t(), out=out)
    else:
        torch.addmm(head.bias, hidden, head.weight.t(), out=out)
    if u is not None and head.b is not None and scratch is not None:
        for part, u_part in zip(out.split(len(scratch)), u.split(len(scratch)), strict=True):
            term = scratch[: len(part)]
            matmul_out(u_part, head.b.t(), term, head.scaling)
            part += term


def _low_rank_gradients(
    grad_logits: torch.Tensor,
    u: torch.Tensor,
    head: Head,
    scratch: torch.Tensor | None,
    gradients: Gradients,
    first: bool,
) -> None:
    """The part of ``chunk_gradients`` that is u's and b's."""
    assert head.b is not None  # it comes with u
    size = len(grad_logits) if scratch is None else len(scratch)
    for start in range(0, len(grad_logits), size):
        part = grad_logits[start : start + size]
        if scratch is not None:
            part = scratch[: len(part)].copy_(part)
        if gradients.u is not None:
            matmul_out(part, head.b, gradients.u[start : start + size], head.scaling)
        if gradients.b is not None:
            accumulate(gradients.b, part.t(), u[start : start + size], first and start == 0)
