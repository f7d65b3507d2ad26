"""Rotary position embedding: pairs of elements of q and k are turned by the angle of their position.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. With (x0, x1) a pair of one
head at one position, and (c0, c1), (s0, s1) what the tables cos and sin hold for its two elements,

    y0 = x0 c0 - x1 s0          backward, the transposed map:   dx0 = dy0 c0 + dy1 s1
    y1 = x1 c1 + x0 s1                                          dx1 = dy1 c1 - dy0 s0

c0 = c1 and s0 = s1 in a plain rotation, but nothing here assumes it. All in float32, rounded once.

Cost for q and k of N elements together, e bytes each: forward and backward read and write them once, 2 N e bytes, with
3 N flops; the tables are read once a token for all heads. Kept for backward: cos and sin, which all layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from slothplug.kernels.backend import Backend, primitives_on
from slothplug.kernels.once_differentiable import once_differentiable

Pairing = Literal["half", "interleaved"]
Output = Literal["same", "half"]
Table = Literal["cat", "halves", "repeat", "single"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rotation(NamedTuple):
    """One linear map of the last dimension, as a backend needs it.

    Attributes:
        start: the first rotated element.
        width: how many elements are rotated, R.
        reads_interleaved: pair p is elements (2p, 2p + 1) of the input; otherwise (p, p + R/2).
        writes_interleaved: the same for the output.
        table: where cos and sin hold the two entries of pair p: (p, p + R/2) for "halves", (2p, 2p + 1) for
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
        backend: who computes, "torch" or "triton".

    Returns:
        q and k rotated, memory in the order of theirs. Differentiable once in q and k; never in cos and sin.

    Raises:
        TypeError: a dtype other than the three.
        ValueError: shapes that do not fit, tables that require a gradient, an unknown option.
    """
    width = _check(q, k, cos, sin, table)
    rotation = Rotation(
        start=q.shape[-1] - width if rotate_last else 0,
        width=width,
        reads_interleaved=pairing == "interleaved",
        writes_interleaved=pairing == "interleaved" and output == "same",
        table=_entries(pairing, output, table),
    )
    dtypes = tuple(_output_dtype(x, cos, sin, promote) for x in (q, k))
    primitives = primitives_on(backend, _TorchPrimitives, "rotary")
    outputs: tuple[torch.Tensor, torch.Tensor | None] = _Rotary.apply(q, k, cos, sin, rotation, dtypes, primitives)
    return outputs


def _check(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, table: Table) -> int:
    """Refuses what cannot be rotated; returns the number of rotated elements a head."""
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
    return width


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


def _output_dtype(x: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, promote: bool) -> torch.dtype | None:
    if x is None or not promote:
        return None if x is None else x.dtype
    return torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))


Pair = tuple[torch.Tensor, torch.Tensor]


class Primitives(Protocol):
    """What a backend implements."""

    @staticmethod
    def rotate(pairs: Sequence[Pair], cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> None:
        """Writes the rotated first tensor of each pair into the second; one pair or two of the same B, T and D."""


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotation: Rotation,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        primitives: Primitives,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        outputs = tuple(
            None if x is None else torch.empty_like(x, dtype=d) for x, d in zip((q, k), dtypes, strict=True)
        )
        _rotate(primitives, (q, k), outputs, cos, sin, rotation)
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.rotation, ctx.primitives = rotation, primitives
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (q, k))
        # The outputs' strides are those of q and k without gaps: a gradient written so is a view of what made them.
        ctx.strides = tuple(None if y is None else y.stride() for y in outputs)
        return outputs[0], outputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = tuple(
            torch.empty_strided(g.shape, strides, dtype=dtype, device=g.device) if g is not None and needed else None
            for g, needed, dtype, strides in zip(
                grad_outputs, ctx.needs_input_grad[:2], ctx.dtypes, ctx.strides, strict=True
            )
        )
        _rotate(ctx.primitives, grad_outputs, grads, cos, sin, ctx.rotation.transpose())
        return (*grads, None, None, None, None, None)


def _rotate(
    primitives: Primitives,
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor | None],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
) -> None:
    """Rotates those of q and k that are there and not empty, together."""
    pairs = [(x, y) for x, y in zip(inputs, outputs, strict=True) if x is not None and y is not None and x.numel()]
    if pairs:
        primitives.rotate(pairs, cos, sin, rotation)


class _TorchPrimitives:
    @staticmethod
    def rotate(pairs: Sequence[Pair], cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> None:
        c0, c1 = _table_entries(cos, rotation)
        s0, s1 = _table_entries(sin, rotation)
        # A pair's partner enters the first element with -s0 and the second with s1; transposed the two change places.
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


def _halves(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _table_entries(table: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """What the two elements of each pair read, [B, 1, T, R/2] float32."""
    table = table.unsqueeze(1)
    if rotation.table == "shared":
        shared = table[..., : rotation.width // 2].float()
        return shared, shared
    first, second = _halves(table, rotation.table == "neighbours")
    return first.float(), second.float()
