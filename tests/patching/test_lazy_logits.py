"""A loss of lazy logits is fused where it can be and stock's everywhere, whatever models do in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slothplug.exactness import assert_as_exact
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.ops.head.head_call import HeadCall
from slothplug.ops.head.lazy_logits import put_off
from slothplug.ops.head.statistics_policy import StatisticsPolicy
from slothplug.patching.served import Calls
from tests.patching.device import DEVICE
from tests.patching.lazy_head import LABELS, B, Head, T, V, assert_close


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
            return put_off(HeadCall(hidden, weight, None, torch.bfloat16, kernel, 4096, Calls(), StatisticsPolicy()))

        oracle = run(lambda hidden, weight: hidden @ weight.t(), hidden.double(), weight.double())
        return run(lazy, hidden, weight), run(F.linear, hidden, weight), oracle

    assert_as_exact(draw)


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
