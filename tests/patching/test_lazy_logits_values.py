"""Lazy logits are a tensor like any other: every writer, alias and reader sees stock's values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from tests.patching.device import DEVICE
from tests.patching.lazy_head import LABELS, Head, V, on_this_device

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1.0),
    "mul_": lambda x: x.mul_(2.0),
    "setitem": lambda x: x.__setitem__((..., 0), -1e9),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(V) > 5, -1.0),
    "tanh_": lambda x: x.tanh_(),
    "out=": lambda x: torch.add(x.detach()[0], 1.0, out=x.detach()[0]),
    "through numpy": lambda x: x.detach().numpy().fill(2.0),
    "through data": lambda x: x.data.zero_(),
}
ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(-1, V),
    "slice": lambda x: x[:, 1:],
    "row": lambda x: x[0],
    "detached": lambda x: x.detach(),
}


@pytest.mark.parametrize("write", on_this_device(WRITES))
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_write_shows_in_every_alias_and_in_no_copy(
    write: Callable[[torch.Tensor], Any], alias: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def story(x: torch.Tensor) -> list[torch.Tensor]:
        before = [x.view(-1, V), x[:, :3], x * 2, x.clone(), x.detach()]
        write(alias(x))
        return [x, *before, x.view(-1, V), x.float()]

    head = Head()
    with torch.no_grad():
        expected, got = story(head.stock()), story(head.lazy())
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours + 0, theirs)
    # and the loss taken afterwards is that of what was written
    torch.testing.assert_close(
        F.cross_entropy(got[0].view(-1, V), LABELS), F.cross_entropy(expected[0].view(-1, V), LABELS)
    )
    assert head.calls.served == 0


@pytest.mark.parametrize("write", ["add_", "mul_", "setitem", "masked_fill_"])
@pytest.mark.parametrize("alias", ["itself", "view", "slice", "row"])
def test_gradients_flow_around_a_write(write: str, alias: str) -> None:
    def use(x: torch.Tensor) -> torch.Tensor:
        other = x.view(-1, V)
        copied = x * 2
        WRITES[write](ALIASES[alias](x))
        return F.cross_entropy(other, LABELS) + copied.square().mean() + x[1].exp().mean()

    Head().check(use, fused=False)


def test_it_behaves_as_a_tensor() -> None:
    head = Head()
    logits, stock = head.lazy(), head.stock()
    assert isinstance(logits, torch.Tensor)
    assert torch.is_tensor(logits)
    for attribute in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "layout",
        "is_sparse",
        "itemsize",
    ):
        assert getattr(logits, attribute) == getattr(stock, attribute), attribute
    assert logits.grad_fn is not None
    assert logits.stride() == stock.stride()
    assert len(logits) == len(stock)
    assert not head.calls.fallbacks, "attributes do not make it real"
    with pytest.raises((RuntimeError, TypeError), match="requires grad" if DEVICE == "cpu" else "host memory"):
        logits.numpy()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(logits)
    assert repr(logits.detach()) == repr(stock.detach())
    assert "grad_fn" in repr(logits)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": numpy.asarray,
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0, 0].item(),
    "float()": lambda x: float(x[0, 0, 0]),
    "cpu": lambda x: x.cpu().numpy(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: _saved(x),
    "iteration": lambda x: [row + 0 for row in x],
    "collate": lambda x: torch.utils.data.default_collate(list(x)),
    "dlpack": torch.from_dlpack,
    "format": lambda x: f"{x[0, 0, 0]:.3f}",
    "data": lambda x: x.data,
    "data_ptr": lambda x: x.data_ptr() != 0,
    "untyped_storage": lambda x: len(x.untyped_storage()),
    "topk": lambda x: x.topk(3),
    "equal": lambda x: torch.equal(x, x),
    "stack": lambda x: torch.stack([x, x]),
    "half": lambda x: x.half() + 0,
    "long": lambda x: x.long(),
    "new_zeros": lambda x: x.new_zeros(3),
    "zeros_like": torch.zeros_like,
    "comparison": lambda x: (x > 0).any(),
    "max": lambda x: x.max(-1),
}  # fmt: skip


def _saved(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("read", on_this_device(READERS))
def test_readers_get_stock_values(read: Callable[[torch.Tensor], Any]) -> None:
    head = Head()
    with torch.no_grad():
        got, expected = read(head.lazy()), read(head.stock())
    if isinstance(expected, torch.Tensor):
        assert type(got) is torch.Tensor
    assert str(got) == str(expected)


def test_reading_twice_gives_the_same_memory() -> None:
    logits = Head().lazy().detach()
    assert logits.data_ptr() == logits.data_ptr() == logits.view(-1, V).data_ptr() == logits.data.data_ptr()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("keepdim", [False, True])
def test_argmax_is_taken_in_chunks(chunk_bytes: int, keepdim: bool) -> None:
    head = Head(chunk_bytes=chunk_bytes)
    logits, stock = head.lazy(), head.stock()
    assert torch.equal((logits[:, 1:] / 3).argmax(-1, keepdim), (stock[:, 1:] / 3).argmax(-1, keepdim))
    assert torch.equal(torch.argmax(logits, dim=2), stock.argmax(2))
    assert not head.calls.fallbacks
    assert torch.equal(logits.argmax(), stock.argmax())
    assert torch.equal(logits.argmax(1), stock.argmax(1))
