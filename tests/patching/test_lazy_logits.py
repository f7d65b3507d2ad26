"""Lazy logits are the logits: every reader, writer and graph sees what it would see on a stock head's output."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slothplug import StaleLogitsError
from slothplug.exactness import assert_as_exact
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.patching.deferred import Product
from slothplug.patching.lazy_logits import LazyLogits, put_off
from slothplug.patching.readers import Readers
from slothplug.patching.sites import Calls
from tests.patching.device import DEVICE, cpu_only

B, T, H, V = 2, 5, 8, 11
LABELS = torch.tensor([3, 0, -100, 10, 5, 1, -100, 2, 9, 4])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * max(1.0, expected.abs().max().item()))


class Head:
    """Operands of one head call; ``stock()`` and ``lazy()`` are its two outputs."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = True, chunk_bytes: int = 2**20) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(B, T, H, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
        self.calls, self.chunk_bytes = Calls(), chunk_bytes

    @property
    def operands(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]

    def stock(self) -> torch.Tensor:
        return F.linear(self.hidden * 1, self.weight, self.bias)

    def lazy(self, dtype: torch.dtype | None = None) -> LazyLogits:
        self.product = Product(
            self.hidden * 1, self.weight, self.bias, dtype or self.hidden.dtype,
            partial(linear_cross_entropy, backend="torch"), self.chunk_bytes, self.calls, lambda *_: None, Readers(),
        )  # fmt: skip
        return put_off(self.product)

    def check(self, use: Callable[[torch.Tensor], torch.Tensor], fused: bool) -> None:
        """``use`` gives stock's values and gradients on lazy logits, and is fused or not."""
        stock = use(self.stock())
        expected = torch.autograd.grad(stock.sum() if stock.ndim else stock, self.operands)
        lazy = use(self.lazy())
        assert_close(lazy.detach() + 0, stock.detach())
        got = torch.autograd.grad(lazy.sum() if lazy.ndim else lazy, self.operands)
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)
        assert self.calls.served == (1 if fused else 0), self.calls
        assert not self.calls.fallbacks if fused else self.calls.fallbacks.total() == 1, self.calls


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), LABELS.view(B, T)[..., 1:].reshape(-1))


FUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: F.cross_entropy(x.view(-1, V), LABELS),
    "module": lambda x: torch.nn.CrossEntropyLoss()(x.reshape(-1, V), LABELS),
    "float": lambda x: F.cross_entropy(x.float().view(-1, V), LABELS, reduction="sum") / torch.tensor(7),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS),
    "shift": shifted,
    "soft-cap": lambda x: F.cross_entropy((torch.tanh(x / 3.0) * 3.0).view(-1, V), LABELS),
    "scale from the left": lambda x: F.cross_entropy((0.25 * x).view(-1, V), LABELS),
    "scale by a 0-d tensor": lambda x: F.cross_entropy((torch.tensor(0.25, device="cpu") * x).view(-1, V), LABELS),
    "divide": lambda x: F.cross_entropy((x / 8).view(-1, V), LABELS),
    "smoothing": lambda x: F.cross_entropy(x.view(-1, V), LABELS, label_smoothing=0.1),
    "class weights": lambda x: F.cross_entropy(x.view(-1, V), LABELS, weight=torch.linspace(0.5, 2.0, V)),
    "ignore_index": lambda x: F.cross_entropy(x.view(-1, V), LABELS.clamp(min=0), ignore_index=0),
    "none": lambda x: (F.cross_entropy(x.view(-1, V), LABELS, reduction="none") * torch.linspace(-1, 2, B * T)).sum(),
    "keywords": lambda x: F.cross_entropy(input=x.view(-1, V), target=LABELS, reduction="sum"),
    "one row": lambda x: F.cross_entropy(x[1], LABELS[5:]) + 0 * x.shape[0],
    "last tokens": lambda x: F.cross_entropy(x[:, -3:, :].reshape(-1, V), LABELS[:6]),
    "chosen rows": lambda x: F.cross_entropy(x[LABELS.view(B, T) >= 0], LABELS[LABELS >= 0]),
    "chosen positions": lambda x: F.cross_entropy(x.view(-1, V)[torch.tensor([7, 0, 0])], LABELS[[7, 0, 0]]),
    "unsqueezed and back": lambda x: F.cross_entropy(x.unsqueeze(1).squeeze(1).view(-1, V), LABELS),
    "split": lambda x: F.cross_entropy(x.split(1)[1].view(-1, V), LABELS[5:]),
    "chunk": lambda x: F.cross_entropy(x.chunk(2)[0][0], LABELS[:5]),
    "iterated": lambda x: F.cross_entropy(next(iter(x)), LABELS[:5]),
    "scaled upstream": lambda x: 65536 * F.cross_entropy(x.view(-1, V), LABELS),
}


@pytest.mark.parametrize("use", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_losses_are_fused_with_what_models_do_in_between(
    use: Callable[[torch.Tensor], torch.Tensor], bias: bool
) -> None:
    Head(bias=bias).check(use, fused=True)


TEMPERATURE = torch.tensor(2.0, requires_grad=True)

READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1)[..., 0],
    "log_softmax and gather": lambda x: x.log_softmax(-1).gather(-1, torch.ones(B, T, 1, dtype=torch.long)),
    "addition": lambda x: x + 1,
    "trained temperature": lambda x: F.cross_entropy((x * TEMPERATURE).view(-1, V), LABELS),
    "vector factor": lambda x: F.cross_entropy((x * torch.linspace(1, 2, V)).view(-1, V), LABELS),
    "slice of the vocabulary": lambda x: F.cross_entropy(x[..., 1:].reshape(-1, V - 1), LABELS.clamp(max=V - 2)),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS.view(B, T)),
    "probabilities as labels": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * T, V), 1 / V)),
    "two soft-caps": lambda x: F.cross_entropy(((x.tanh() * 3).tanh() * 2).view(-1, V), LABELS),
    "matmul": lambda x: x @ torch.ones(V, 2),
    "concatenated": lambda x: torch.cat([x[:, :2], x[:, 2:]], 1).exp(),
    "rolled into another shape": lambda x: x.view(B, -1).exp(),
    "double use": lambda x: 0.1 * x.square().mean() + F.cross_entropy(x.view(-1, V), LABELS),
}  # fmt: skip


@pytest.mark.parametrize("use", READ.values(), ids=READ)
def test_everything_else_is_stock(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    Head().check(use, fused=False)


def test_a_loss_and_then_another_use_of_the_same_logits() -> None:
    # https://github.com/unslothai/unsloth/issues/5002
    head = Head()

    def use(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.view(-1, V), LABELS) + 0.1 * x.square().mean() + x.softmax(-1)[..., 1].sum()

    expected = torch.autograd.grad(use(head.stock()), head.operands)
    total = use(head.lazy())
    for retain in (True, False):
        got = torch.autograd.grad(total, head.operands, retain_graph=retain)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert head.calls.served == 1


@pytest.mark.parametrize("read", [False, True])
def test_rows_are_chosen_when_they_are_chosen(read: bool) -> None:
    def use(x: torch.Tensor) -> torch.Tensor:
        mask = LABELS >= 0
        chosen = x.view(-1, V)[mask]
        mask.zero_()
        return chosen.exp() if read else F.cross_entropy(chosen, LABELS[LABELS >= 0])

    head = Head()
    with torch.no_grad():
        assert_close(use(head.lazy()) + 0, use(head.stock()))
    assert head.calls.served == (0 if read else 1)


def test_class_weights_that_want_a_gradient_are_refused_as_in_stock() -> None:
    head, weight = Head(), torch.ones(V, requires_grad=True)
    for logits in (head.lazy(), head.stock()):
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
            F.cross_entropy(logits.view(-1, V), LABELS, weight=weight)


# In-place writes


def on_this_device(cases: dict[str, Callable[..., Any]]) -> list[Any]:
    """NumPy shares memory with tensors on a CPU only."""
    of_a_cpu = {"numpy", "asarray", "through numpy"}
    return [pytest.param(case, id=name, marks=[cpu_only] if name in of_a_cpu else []) for name, case in cases.items()]


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


# Graphs


class Square(torch.autograd.Function):
    """A custom Function that looks at memory, as one with a kernel of its own does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr() != 0
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output


class Doubled(torch.autograd.Function):
    """Returns what it got, and doubles the gradient: visible only where its node is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        return {"same": x, "view": x.view(x.shape), "clone": x.clone(), "detach": x.detach()}[how]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * grad_output, None


def test_a_custom_function_gets_values_and_its_gradient_flows() -> None:
    Head().check(lambda x: Square.apply(x.float() * 0.5), fused=False)


@pytest.mark.parametrize("how", ["same", "view", "clone", "detach"])
def test_a_custom_function_between_head_and_loss_is_not_jumped_over(how: str) -> None:
    Head().check(lambda x: F.cross_entropy(Doubled.apply(x, how).view(-1, V), LABELS), fused=False)


def test_hooks_and_retained_gradients_get_the_gradient_of_the_logits() -> None:
    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        x.register_hook(seen.append)
        x.retain_grad()
        F.cross_entropy(x.view(-1, V), LABELS).backward()
        return [*seen, x.grad]

    head = Head()
    for ours, theirs in zip(gradients(head.lazy()), gradients(head.stock()), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_hook_after_the_fused_loss_is_refused() -> None:
    logits = Head().lazy()
    F.cross_entropy(logits.view(-1, V), LABELS)
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        logits.register_hook(print)


def test_double_backward_through_read_logits() -> None:
    head = Head()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.exp().sum(), head.hidden, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(head.stock()), head.operands)
    for ours, theirs in zip(torch.autograd.grad(penalty(head.lazy()), head.operands), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trains", [(True, False), (False, True), (False, False)], ids=["hidden", "head", "nothing"])
def test_what_needs_no_gradient_gets_none(trains: tuple[bool, bool]) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/930
    head = Head(bias=False)
    head.hidden.requires_grad_(trains[0])
    head.weight.requires_grad_(trains[1])
    logits = head.lazy()
    loss, expected = F.cross_entropy(logits.view(-1, V), LABELS), F.cross_entropy(head.stock().view(-1, V), LABELS)
    torch.testing.assert_close(loss, expected)
    assert logits.requires_grad == loss.requires_grad == expected.requires_grad == any(trains)
    if any(trains):
        loss.backward()
        assert [t.grad is not None for t in (head.hidden, head.weight)] == list(trains)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_the_loss_is_fused_and_has_no_graph(mode: Callable[[], Any]) -> None:
    head = Head()
    with mode():
        loss = F.cross_entropy(head.lazy().float().view(-1, V), LABELS)
        expected = F.cross_entropy(head.stock().float().view(-1, V), LABELS)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected)
        assert head.calls.served == 1
        torch.testing.assert_close(head.lazy() + 0, head.stock())


def test_a_head_called_without_grad_stays_out_of_the_graph() -> None:
    head = Head()
    with torch.no_grad():
        logits = head.lazy()
    assert not F.cross_entropy(logits.view(-1, V), LABELS).requires_grad
    assert not (logits * 2).requires_grad


# A tensor like any other


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


# Autocast


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False], ids=["read inside", "read outside"])
def test_values_are_those_of_the_autocast_region_of_the_head(operands: torch.dtype, inside: bool) -> None:
    head = Head(operands)

    def use(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            x = make()
            if inside:
                return (x * 1.5).exp()
        return (x * 1.5).exp()

    stock, lazy = use(head.stock), use(lambda: head.lazy(torch.bfloat16))
    assert torch.equal(lazy, stock)
    assert lazy.dtype == stock.dtype
    for ours, theirs in zip(
        torch.autograd.grad(lazy.sum(), head.operands), torch.autograd.grad(stock.sum(), head.operands), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert ours.dtype is operands


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("upcast", [True, False])
@pytest.mark.parametrize("region", [True, False])
def test_the_loss_has_stock_dtype(reduction: str, upcast: bool, region: bool) -> None:
    head = Head(torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=region):
        losses = [
            F.cross_entropy((x.float() if upcast else x).view(-1, V), LABELS, reduction=reduction)
            for x in (head.lazy(), head.stock())
        ]
    assert losses[0].dtype is losses[1].dtype
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    assert head.calls.served == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "pure"])
@pytest.mark.parametrize("cap", [None, 5.0], ids=["", "soft-cap"])
def test_bfloat16_is_as_exact_as_stock(dtype: torch.dtype, cap: float | None) -> None:
    region = dtype is torch.float32
    rows, width, words = 24, 32, 67

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x / cap) * cap if cap is not None else x
        return F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)).view(-1, words), labels)

    def draw(seed: int) -> tuple[dict[str, torch.Tensor], ...]:
        torch.manual_seed(seed)
        scales = torch.tensor([1e-3, 1.0, 10.0]).repeat(rows // 3).view(1, rows, 1)
        hidden = (torch.randn(1, rows, width) * scales).to(dtype)
        weight = (torch.randn(words, width) * 0.2).to(dtype)
        labels = torch.randint(words, (rows,))
        labels[::5] = -100

        def run(head: Callable[..., torch.Tensor], *operands: torch.Tensor) -> dict[str, torch.Tensor]:
            leaves = [operand.detach().requires_grad_() for operand in operands]
            with torch.autocast(DEVICE, torch.bfloat16, enabled=region and operands[0].dtype is not torch.float64):
                value = loss(head(*leaves), labels)
            gradients = torch.autograd.grad(value, leaves)
            # Under autocast they are float32 tensors of bfloat16 values: their rounding is bfloat16's.
            exact = torch.float64 if operands[0].dtype is torch.float64 else torch.bfloat16
            return {"hidden": gradients[0].to(exact), "weight": gradients[1].to(exact), "loss": value}

        def lazy(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            kernel = partial(linear_cross_entropy, backend="torch")
            return put_off(
                Product(hidden, weight, None, torch.bfloat16, kernel, 4096, Calls(), lambda *_: None, Readers())
            )

        oracle = run(lambda hidden, weight: hidden @ weight.t(), hidden.double(), weight.double())
        return run(lazy, hidden, weight), run(F.linear, hidden, weight), oracle

    assert_as_exact(draw)


# Life after the call


def test_logits_that_no_loss_was_taken_of_are_real_when_the_call_ends() -> None:
    head = Head()
    logits = head.lazy() / 2
    head.product.close(completed=True)
    stock = head.stock() / 2
    with torch.no_grad():
        head.weight.zero_()
    assert torch.equal(logits + 0, stock)


def test_nothing_is_computed_when_a_call_fails_or_nobody_holds_the_logits() -> None:
    head = Head()
    logits = head.lazy()
    head.product.close(completed=False)
    assert not head.calls.fallbacks
    logits = head.lazy()
    product = head.product
    del logits, head
    gc.collect()
    product.close(completed=True)
    assert not product.calls.fallbacks


def test_a_second_loss_after_the_call_is_stock() -> None:
    head = Head()
    logits = head.lazy()
    F.cross_entropy(logits.view(-1, V), LABELS)
    head.product.close(completed=True)
    loss = F.cross_entropy(logits.view(-1, V), LABELS)
    assert head.calls.served == 1
    assert head.calls.fallbacks.total() == 1
    expected = torch.autograd.grad(F.cross_entropy(head.stock().view(-1, V), LABELS), head.operands)
    for ours, theirs in zip(torch.autograd.grad(loss, head.operands), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def after_a_loss(head: Head) -> LazyLogits:
    logits = head.lazy()
    F.cross_entropy(logits.view(-1, V), LABELS).backward()
    head.product.close(completed=True)
    return logits


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["loop", "fused", "foreach"])
@pytest.mark.parametrize("read", [lambda x: x + 0, lambda x: x.argmax(-1), lambda x: x.float().tolist()])
def test_reading_after_a_step_of_the_head_raises(options: dict[str, bool], read: Callable[[torch.Tensor], Any]) -> None:
    head = Head()
    logits = after_a_loss(head)
    torch.optim.AdamW([head.weight], lr=1e-2, **options).step()
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        read(logits)


def test_reading_before_the_step_is_fine_and_stays_so() -> None:
    head = Head()
    expected = head.stock().detach()
    logits = after_a_loss(head)
    assert torch.equal(logits.detach() + 0, expected)
    torch.optim.AdamW([head.weight], lr=1e-2, fused=True).step()
    assert torch.equal(logits.detach() + 0, expected)


def test_reading_after_a_step_is_fine_where_the_head_is_frozen() -> None:
    head = Head(bias=False)
    head.weight.requires_grad_(False)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    expected = head.stock().detach()
    logits = after_a_loss(head)
    torch.optim.AdamW([other], lr=1e-2).step()
    assert torch.equal(logits.detach() + 0, expected)


def test_a_loss_after_the_head_was_written_raises() -> None:
    head = Head()
    logits = head.lazy()
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(StaleLogitsError):
        logits + 0


@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_nothing_outlives_the_logits(soft_cap: bool, read: bool) -> None:
    head = Head()
    logits = head.lazy()
    hidden = weakref.ref(head.product)
    x = torch.tanh(logits / 3) * 3 if soft_cap else logits.float()
    loss = F.cross_entropy(x.view(-1, V), LABELS)
    if read:
        loss = loss + x.sum()
    loss.backward()
    head.product.close(completed=True)
    del logits, x, loss, head
    assert hidden() is None, "a cycle through the graph keeps the hidden states alive"


# Any chain of steps


@st.composite
def chains(draw: st.DrawFn) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    factor = st.floats(0.25, 4.0)
    step = st.one_of(
        factor.map(lambda c: lambda x: x * c),
        factor.map(lambda c: lambda x: x / c),
        st.just(lambda x: x.float()),
        st.just(lambda x: x.double()),
        st.just(lambda x: x.clone()),
        st.just(lambda x: x.tanh()),
        st.just(lambda x: x.contiguous()),
        st.just(lambda x: x.reshape(-1, V)),
        st.just(lambda x: x.unsqueeze(0)),
        st.just(lambda x: x[..., :]),
        st.integers(0, 3).map(lambda k: lambda x: x[..., k % max(1, x.shape[-2]) :, :]),
        st.integers(1, 3).map(lambda k: lambda x: x[..., ::k, :]),
        st.just(lambda x: x.flip(-2)),
        st.just(lambda x: x + 0.5),
        st.just(lambda x: x[..., [0, -1], :]),
    )
    return draw(st.lists(step, max_size=7))


@given(chain=chains(), seed=st.integers(0, 9))
@settings(max_examples=120, deadline=None)
def test_any_chain_of_steps_is_stock(chain: list[Callable[[torch.Tensor], torch.Tensor]], seed: int) -> None:
    head = Head()
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def use(x: torch.Tensor) -> torch.Tensor:
        for step in chain:
            x = step(x)
        x = x.reshape(-1, V)
        return F.cross_entropy(x, torch.randint(V, x.shape[:1], generator=generator.manual_seed(seed)))

    expected, got = use(head.stock()), use(head.lazy())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(got, head.operands), torch.autograd.grad(expected, head.operands), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
