"""Rows in memory order: offsets are those of torch's own indexing, for any shape and strides."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slothplug.kernels import row_layout
from tests.kernels.strided import strided


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Several tensors of one shape [..., H] with up to three outer dimensions."""
    shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), draw(st.integers(1, 3)))
    return [draw(strided(shape)) for _ in range(draw(st.integers(1, 3)))]


@given(tensors())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_offsets_are_those_of_every_row(drawn: list[torch.Tensor]) -> None:
    first = drawn[0]
    order = row_layout.row_order(first.stride())
    merged = row_layout.merge_rows(order, first.shape, *(t.stride() for t in drawn))
    assert merged.rows == math.prod(first.shape[:-1])
    size_1, size_2 = merged.sizes
    visited = []
    for row in range(merged.rows):
        found = []
        for t, (stride_0, stride_1, stride_2) in zip(drawn, merged.strides, strict=True):
            outer = row // size_2
            offset = outer // size_1 * stride_0 + outer % size_1 * stride_1 + row % size_2 * stride_2
            found.append(t.as_strided(t.shape[-1:], t.stride()[-1:], t.storage_offset() + offset).tolist())
        visited.append(found)
    indices = itertools.product(*(range(size) for size in first.shape[:-1]))
    expected = [[t[index].tolist() for t in drawn] for index in indices]
    assert sorted(visited) == sorted(expected)


@given(tensors())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_view_as_a_matrix_has_the_row_stride(drawn: list[torch.Tensor]) -> None:
    for t in drawn:
        stride = row_layout.matrix_stride(t.shape, t.stride())
        try:
            view = t.view(-1, t.shape[-1])
        except RuntimeError:
            assert stride is None
            continue
        assert view.shape[0] == 1 or stride == view.stride(0)


@given(tensors())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_new_tensors_have_the_order_of_the_rows(drawn: list[torch.Tensor]) -> None:
    for t in drawn:
        order = row_layout.row_order(t.stride())
        rows, values = row_layout.empty_rows(t, torch.float16), row_layout.empty_row_values(t)
        assert (rows.shape, rows.dtype) == (t.shape, torch.float16)
        assert (values.shape, values.dtype) == (t.shape[:-1], torch.float32)
        assert row_layout.is_dense(order, t.shape, values.stride())
        assert row_layout.is_dense((*order, t.ndim - 1), t.shape, rows.stride())
        if t.is_contiguous():
            assert rows.is_contiguous()
            assert values.is_contiguous()


def test_more_dimensions_than_three_outer_ones() -> None:
    x = torch.randn(2, 3, 2, 3, 4).transpose(0, 3)
    assert row_layout.empty_rows(x, torch.float32).is_contiguous()
    assert row_layout.empty_row_values(x).is_contiguous()
