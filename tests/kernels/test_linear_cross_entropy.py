"""Linear + cross-entropy's contract, on both backends: gradients asked for, dtypes, autocast, refusals, no wait."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slothplug.kernels.backend import Backend
from slothplug.kernels.linear_cross_entropy import LowRank, Reduction, linear_cross_entropy
from tests.kernels.linear_cross_entropy_oracle import EPILOGUES, IGNORED, differentiate, draw_labels, oracle, stock
from tests.kernels.watch import Watch

# The interpreter computes masked lanes as well, and numpy warns of overflow in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for(
    reduction: Reduction, trains: tuple[bool, ...], backend: Backend, device: torch.device
) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/930: each combination of what needs a gradient."""
    count, width, vocabulary = 6, 3, 70
    operands = [torch.randn(count, width), torch.randn(vocabulary, width), torch.randn(vocabulary)]
    leaves = [t.to(device).requires_grad_(needs) for t, needs in zip(operands, trains, strict=True)]
    labels = draw_labels(count, vocabulary).to(device)
    with Watch() as watch:
        loss = linear_cross_entropy(
            leaves[0], leaves[1], labels, bias=leaves[2], reduction=reduction, backend=backend
        ).sum()
        if any(trains):
            loss.backward()
    again = reduction == "none" and any(trains)
    assert watch.products.count((count, vocabulary)) == 1 + again
    assert watch.products.count((count, width)) == trains[0]
    assert watch.products.count((vocabulary, width)) == trains[1]
    expected = stock(leaves[0], leaves[1], labels, bias=leaves[2], reduction=reduction).sum()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.requires_grad == any(trains)
    if any(trains):
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf, gradient in zip(asked, torch.autograd.grad(expected, asked), strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all((leaf.grad is not None) == needs for leaf, needs in zip(leaves, trains, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_only_the_loss_is_computed(mode: Any, backend: Backend, device: torch.device) -> None:
    hidden = torch.randn(6, 3, device=device, requires_grad=True)
    weight = torch.randn(70, 3, device=device, requires_grad=True)
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    with mode(), Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend)
    assert watch.products == [(6, 70)]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, stock(hidden, weight, labels).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_twice_gives_the_same_bits_and_writes_nothing_of_the_callers(
    dtype: torch.dtype, reduction: Reduction, backend: Backend, device: torch.device
) -> None:
    hidden = torch.randn(6, 3).to(device, dtype).requires_grad_()
    weight = torch.randn(70, 3).to(device, dtype).requires_grad_()
    term = LowRank(*(torch.randn(n, 2).to(device).requires_grad_() for n in (6, 70)), 0.3)
    operands = (hidden, weight, term.u, term.b)
    labels = draw_labels(6, 70).to(device)
    class_weight = torch.rand(70).to(device)
    kept = [t.detach().clone() for t in (*operands, labels, class_weight)]
    options: dict[str, Any] = {"class_weight": class_weight, "label_smoothing": 0.1, "reduction": reduction}
    loss = linear_cross_entropy(hidden, weight, labels, low_rank=term, backend=backend, **options)
    grad_output = torch.full((1,), 0.37, dtype=loss.dtype, device=device).expand(6)
    grad_output = grad_output if reduction == "none" else grad_output[0]
    first = torch.autograd.grad(loss, operands, grad_output, retain_graph=True)
    second = torch.autograd.grad(loss, operands, grad_output, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, (*operands, labels, class_weight), strict=True))
    assert (grad_output == torch.tensor(0.37, dtype=loss.dtype)).all()


@pytest.mark.parametrize("label", [70, -1, 2**40])
def test_labels_out_of_range_raise_as_without_fusion(label: int, backend: Backend) -> None:
    hidden, weight, labels = torch.randn(3, 4), torch.randn(70, 4), torch.tensor([1, label, IGNORED])
    with pytest.raises(IndexError) as expected:
        stock(hidden, weight, labels)
    for max_valid in (None, 2):
        with pytest.raises(IndexError) as raised:
            linear_cross_entropy(hidden, weight, labels, max_valid=max_valid, backend=backend)
        assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_inside(cast: torch.dtype, backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/501: some operands were autocast and others were not."""
    hidden, weight = torch.randn(6, 8).to(device), torch.randn(70, 8).to(device)
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    for reduction in ("mean", "none"):

        def call(h: Tensor, w: Tensor, reduction: Reduction = reduction) -> Tensor:
            return linear_cross_entropy(h, w, labels, reduction=reduction, backend=backend)

        outside = differentiate(call, 1.0, hidden, weight)
        with torch.autocast(device.type, dtype=cast):
            inside = differentiate(call, 1.0, hidden, weight)
        assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_those_of_stock(dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    operands = [torch.randn(6, 3).to(device, dtype), torch.randn(70, 3).to(device, dtype)]
    labels = draw_labels(6, 70).to(device)
    for reduction, epilogue in itertools.product(("mean", "none"), ((), EPILOGUES["cast"])):
        options: dict[str, Any] = {"reduction": reduction, "epilogue": epilogue}
        got = differentiate(
            lambda h, w, o=options: linear_cross_entropy(h, w, labels, backend=backend, **o), 1.0, *operands
        )
        want = differentiate(lambda h, w, o=options: stock(h, w, labels, **o), 1.0, *operands)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]


def test_float64_is_computed_in_float64(backend: Backend, device: torch.device) -> None:
    operands = [torch.randn(6, 3, dtype=torch.float64, device=device) for _ in range(1)]
    operands.append(torch.randn(70, 3, dtype=torch.float64, device=device))
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, *operands)
    for mine, reference in zip(got, differentiate(lambda h, w: oracle(h, w, labels), 1.0, *operands), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)


def test_refusals() -> None:
    hidden, weight, labels = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3])
    with pytest.raises(TypeError, match=r"hidden torch\.bfloat16, weight torch\.float32"):
        linear_cross_entropy(hidden.bfloat16(), weight, labels)
    with pytest.raises(TypeError, match=r"bias torch\.float16"):
        linear_cross_entropy(hidden, weight, labels, bias=torch.randn(7).half())
    with pytest.raises(TypeError, match="int64"):
        linear_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(TypeError, match="class_weight"):
        linear_cross_entropy(hidden, weight, labels, class_weight=torch.ones(7, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:2])
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, torch.randn(7, 5), labels)
    for term in (
        LowRank(torch.randn(3, 2), torch.randn(7, 2).half(), 1.0),
        LowRank(*torch.ones(2, 3, 3).double(), 1.0),
    ):
        with pytest.raises(TypeError, match="low_rank is floating"):
            linear_cross_entropy(hidden, weight, labels, low_rank=term)
    for u, b in (((3, 2), (7, 1)), ((2, 2), (7, 2)), ((3, 2), (6, 2)), ((3,), (7, 2))):
        with pytest.raises(ValueError, match=r"u \[N, r\] and b \[V, r\] do not fit"):
            linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(torch.randn(u), torch.randn(b), 1.0))
    with pytest.raises(ValueError, match="empty vocabulary"):
        linear_cross_entropy(hidden, torch.randn(0, 4), torch.full((3,), IGNORED))
    with pytest.raises(ValueError, match=r"class_weight is \[V\]"):
        linear_cross_entropy(hidden, weight, labels, class_weight=torch.ones(3))
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(hidden, weight, labels, reduction="batchmean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(hidden, weight, labels, label_smoothing=1.5)
    with pytest.raises(ValueError, match="chunk_bytes"):
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=0)
    with pytest.raises(ValueError, match="tanh"):
        linear_cross_entropy(hidden, weight, labels, epilogue=(("tanh", None), ("tanh", None)))
    with pytest.raises(ValueError, match="backend"):
        linear_cross_entropy(hidden, weight, labels, backend="cuda")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("max_valid", [None, 3000])
def test_never_waits_for_the_device(max_valid: int | None, backend: Backend, device: torch.device) -> None:
    hidden = torch.randn(4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(4096, device=device) % 1000
    labels[3000:] = IGNORED

    def step() -> None:
        loss = linear_cross_entropy(
            hidden, weight, labels, reduction="sum", epilogue=EPILOGUES["cast"], max_valid=max_valid, backend=backend
        )
        (loss / 7).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
