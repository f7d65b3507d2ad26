"""Tensors of any strides, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], expanded: bool = True) -> torch.Tensor:
    """Random normal numbers of ``shape``: any order of dimensions in memory, gaps along some, some ``expanded``."""
    order = draw(st.permutations(range(len(shape))))
    gaps = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=len(shape), max_size=len(shape)))
    kinds = [False, False, False, True] if expanded else [False]
    one = draw(st.lists(st.sampled_from(kinds), min_size=len(shape), max_size=len(shape)))
    sizes = [1 if one[dim] else shape[dim] for dim in order]
    dense = torch.randn([size * gaps[dim] for size, dim in zip(sizes, order, strict=True)])
    dense = dense[tuple(slice(None, None, gaps[dim]) for dim in order)]
    return dense.permute([order.index(dim) for dim in range(len(shape))]).expand(shape)


@st.composite
def destination(draw: st.DrawFn, shape: tuple[int, ...], collapses: bool = False) -> torch.Tensor:
    """A tensor of ``shape`` to write to, of nan, whose last dimension has stride 1.

    Its rows lie in any order and with gaps; where it ``collapses``, in order and equally far apart.
    """
    outer = len(shape) - 1
    order = tuple(range(outer)) if collapses else draw(st.permutations(range(outer)))
    gap = draw(st.integers(0, 3))
    dense = torch.full([*(shape[dim] for dim in order), shape[-1] + gap], torch.nan)[..., : shape[-1]]
    return dense.permute([*(order.index(dim) for dim in range(outer)), outer])
