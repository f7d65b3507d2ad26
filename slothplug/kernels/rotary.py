"""Rotary position embedding: pairs of elements of q and k are rotated by the angle of their position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. With (x0, x1) a pair of one
head at one position, (c0, c1), (s0, s1) the entries of the tables cos and sin for its two elements, and (g0, g1) the
gradient of (y0, y1),

    y0 = x0 c0 - x1 s0          backward, the transposed map:   grad_x0 = g0 c0 + g1 s1
    y1 = x1 c1 + x0 s1                                          grad_x1 = g1 c1 - g0 s0

c0 = c1 and s0 = s1 in a plain rotation, but nothing here assumes it. All in float32, rounded once.

Cost for q and k of N elements together, e bytes each: forward and backward read and write them once, 2 N e bytes, with
3 N flops; the tables are read once a token for all heads. Kept for backward: cos and sin, which all layers share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.once_differentiable import once_differentiable

Pairing = Literal["half", "interleaved"]
Output = Literal["same", "half"]
Table = Literal["cat", "halves", "repeat", "single"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rotation(NamedTuple):
    """One linear map of the last dimension.

    Attributes:
        start: the first rotated element.
        width: the number of rotated elements, R.
        reads_interleaved: pair p is elements (2p, 2p + 1) of the input; otherwise (p, p + R/2).
        writes_interleaved: the same for the output.
        table: the indices of pair p's two entries in cos and sin: (p, p + R/2) for "halves", (2p, 2p + 1) for
            "neighbours", p for both where they are "shared".
        transposed: the map of the gradients.
    """

    start: int
    width: int
    reads_interleaved: bool
    writes_interleaved: bool
    table: Literal["halves", "neighbours", "shared"]
    transposed: bool = False

    def transpose(self) -> Rotation:
        return self._replace(
            reads_interleaved=self.writes_interleaved, writes_interleaved=self.reads_interleaved, transposed=True
        )


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairing: Pairing = "half",
    output: Output = "same",
    table: Table = "cat",
    rotate_last: bool = False,
    promote: bool = True,
    backend: Backend = "torch",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates q and k by the tables' angles; elements of a head beyond the rotated ones are copied unchanged.

    Args:
        q: [B, Hq, T, D], float32, float16 or bfloat16, any strides.
        k: [B, Hk, T, D], or None to rotate q alone.
        cos, sin: [B, T, R] or [1, T, R] ([.., T, R/2] for table="single"), R even and at most D, any strides.
        pairing: "half" pairs element i with i + R/2, "interleaved" 2i with 2i + 1.
        output: "half" writes interleaved pairs as halves: first all x0, then all x1 (DeepSeek V3).
        table: how R entries serve R/2 pairs. "cat": [a, b, .., a, b, ..]; with half pairing each element reads its own
            entry, with interleaved pairing the first half serves both elements (GLM). "halves": the same layout, of
            which each element of an interleaved pair reads its own half (DeepSeek V3 in transformers 4). "repeat":
            [a, a, b, b, ..], each element of an interleaved pair reads its own (Cohere). "single": [a, b, ..], both
            read one (GPT-OSS).
        rotate_last: the last R elements of a head are rotated, not the first R (DeepSeek V4).
        promote: outputs have the dtype that torch promotes the input and the tables to (a bfloat16 q with float32
            tables gives float32, as the usual eager function does); otherwise the input's own.
        backend: "torch" or "triton".

    Returns:
        q and k rotated, with the memory layout of q and k, without gaps. Differentiable once in q and k; not in cos and
        sin.

    Raises:
        TypeError: a dtype other than the three.
        ValueError: shapes that do not fit, tables that require a gradient, an unknown option.
    """
    _check(q, k, cos, sin, table)
    rotation = rotation_of(q.shape[-1], cos.shape[-1], pairing, output, table, rotate_last)
    outputs: tuple[torch.Tensor, torch.Tensor | None] = _Rotary.apply(
        q, k, cos, sin, rotation, promote, primitives(backend)
    )
    return outputs


@functools.lru_cache(maxsize=256)
def rotation_of(
    head_dim: int,
    table_width: int,
    pairing: Pairing = "half",
    output: Output = "same",
    table: Table = "cat",
    rotate_last: bool = False,
) -> Rotation:
    """The map of heads of ``head_dim`` by tables [.., table_width] for the options of ``rotary``."""
    width = table_width * (2 if table == "single" else 1)
    return Rotation(
        start=head_dim - width if rotate_last else 0,
        width=width,
        reads_interleaved=pairing == "interleaved",
        writes_interleaved=pairing == "interleaved" and output == "same",
        table=_entries(pairing, output, table),
    )


def _check(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, table: Table) -> None:
    for tensor in (q, cos, sin) if k is None else (q, k, cos, sin):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"rotary takes float32, float16 and bfloat16, not {tensor.dtype}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary computes no gradients of cos and sin, and they require one")
    batch, _, tokens, head_dim = q.shape
    width = cos.shape[-1] * (2 if table == "single" else 1)
    if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        raise ValueError(f"tables {tuple(cos.shape)} and {tuple(sin.shape)} do not fit q, {tuple(q.shape)}")
    if width % 2 or not 0 < width <= head_dim:
        raise ValueError(f"{width} rotated elements of a head of {head_dim}: must be even and at most all")
    if k is not None and (k.ndim, k.shape[0], *k.shape[2:]) != (4, batch, tokens, head_dim):
        raise ValueError(f"q, {tuple(q.shape)}, and k, {tuple(k.shape)}, may differ in their heads only")


def _entries(pairing: Pairing, output: Output, table: Table) -> Literal["halves", "neighbours", "shared"]:
    if pairing not in ("half", "interleaved") or output not in ("same", "half"):
        raise ValueError(f"unknown pairing {pairing!r} or output {output!r}")
    if table == "cat":
        return "halves" if pairing == "half" else "shared"
    if table == "halves" and pairing == "interleaved":
        return "halves"
    if table == "repeat" and pairing == "interleaved":
        return "neighbours"
    if table == "single":
        return "shared"
    raise ValueError(f"a table {table!r} has no meaning for pairing {pairing!r}")


Pair = tuple[torch.Tensor, torch.Tensor]


class Primitives:
    """The mathematics without autograd, checks and allocations, in PyTorch; Triton's class has the same functions."""

    @staticmethod
    def rotate(pairs: Sequence[Pair], cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> None:
        """Writes the rotated first tensor of each pair into the second: q's and k's, or one of them.

        Args:
            pairs: one or two, [B, H, T, D], not empty, of the same B, T and D, any strides and dtypes. The tensors of a
                pair do not overlap.
            cos, sin: as ``rotary`` takes them.
            rotation: the map; ``rotation.transpose()`` for gradients.
        """
        c0, c1 = _table_entries(cos, rotation)
        s0, s1 = _table_entries(sin, rotation)
        # x1 enters the first element with -s0, and x0 the second with s1; in the transposed map the two are exchanged.
        first, second = (s1, -s0) if rotation.transposed else (-s0, s1)
        stop = rotation.start + rotation.width
        for x, y in pairs:
            x0, x1 = (half.float() for half in _halves(x[..., rotation.start : stop], rotation.reads_interleaved))
            y0, y1 = _halves(y[..., rotation.start : stop], rotation.writes_interleaved)
            y0.copy_((x0 * c0).addcmul_(x1, first))
            y1.copy_((x1 * c1).addcmul_(x0, second))
            if rotation.width < x.shape[-1]:
                rest = slice(stop, None) if rotation.start == 0 else slice(0, rotation.start)
                y[..., rest] = x[..., rest]


def primitives(backend: Backend) -> type[Primitives]:
    """The functions of ``backend``."""
    return primitives_on(backend, Primitives, "rotary")


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotation: Rotation,
        promote: bool,
        primitives: type[Primitives],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tables = torch.promote_types(cos.dtype, sin.dtype) if promote else None
        q_out = _empty_output(q, tables)
        k_out = None if k is None else _empty_output(k, tables)
        _rotate_pairs(primitives, (q, k), (q_out, k_out), cos, sin, rotation)
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.rotation, ctx.primitives = rotation, primitives
        # The outputs' strides are those of q and k without gaps: gradients of these strides are views of what q and k
        # are views of.
        ctx.layouts = ((q.dtype, q_out.stride()), None if k is None or k_out is None else (k.dtype, k_out.stride()))
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        grad_q = _empty_gradient(grad_outputs[0], ctx.layouts[0]) if needs_q else None
        grad_k = _empty_gradient(grad_outputs[1], ctx.layouts[1]) if needs_k else None
        _rotate_pairs(ctx.primitives, grad_outputs, (grad_q, grad_k), cos, sin, _transposed(ctx.rotation))
        return grad_q, grad_k, None, None, None, None, None


def _empty_output(x: torch.Tensor, tables: torch.dtype | None) -> torch.Tensor:
    """For x rotated; in the dtype that torch promotes x's and that of the ``tables`` to, where that is given."""
    promoted = x.dtype if tables is None or tables is x.dtype else torch.promote_types(x.dtype, tables)
    return torch.empty_like(x, dtype=promoted)


def _empty_gradient(
    grad_output: torch.Tensor | None, layout: tuple[torch.dtype, tuple[int, ...]]
) -> torch.Tensor | None:
    if grad_output is None:
        return None
    dtype, strides = layout
    return torch.empty_strided(grad_output.shape, strides, dtype=dtype, device=grad_output.device)


@functools.lru_cache(maxsize=256)
def _transposed(rotation: Rotation) -> Rotation:
    return rotation.transpose()


def _rotate_pairs(
    primitives: type[Primitives],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor | None],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
) -> None:
    """Rotates q and k together, without what is None or empty."""
    pairs = [(x, y) for x, y in zip(inputs, outputs, strict=True) if x is not None and y is not None and x.numel()]
    if pairs:
        primitives.rotate(pairs, cos, sin, rotation)


def _halves(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _table_entries(table: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries for the first and for the second elements of the pairs, [B, 1, T, R/2] float32 each."""
    table = table.unsqueeze(1)
    if rotation.table == "shared":
        shared = table[..., : rotation.width // 2].float()
        return shared, shared
    first, second = _halves(table, rotation.table == "neighbours")
    return first.float(), second.float()
