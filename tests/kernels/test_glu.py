"""The gated linear unit, on both backends: exactness, strides, gradients, overflow and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from slothplug.exactness import assert_as_exact
from slothplug.kernels.backend import Backend
from slothplug.kernels.glu import (
    ACTIVATIONS,
    LAYOUTS,
    Activation,
    Layout,
    glu,
    glu_packed,
    split_packed,
)
from slothplug.kernels.glu import primitives as primitives_of
from tests.kernels.strided import destination

STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

# In float64, from the definitions.
ORACLE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * torch.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: torch.where(x > 0, x, 0),
    "relu2": lambda x: torch.where(x > 0, x, 0) ** 2,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

# (rms of gate, rms of up) of the rows, mixed. The pairs keep the products of one size, so that no few rows carry the
# pooled sums; float16 stops where stock itself would overflow.
ROW_RMS = {
    torch.float32: ((1e-3, 1e3), (1.0, 1.0), (3.0, 1.0), (1e3, 1e-3)),
    torch.bfloat16: ((1e-3, 1e3), (1.0, 1.0), (3.0, 1.0), (1e3, 1e-3)),
    torch.float16: ((1e-3, 1e3), (1.0, 1.0), (3.0, 1.0), (1e2, 1e-2)),
}


def skip_if_not_rounded(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    if backend == "triton" and dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter truncates where it stores bfloat16")


def draw_inputs(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """grad_output, gate and up, [24, 77], uniform: normal draws would hand the sums to a few squared tails."""
    rms = torch.tensor(ROW_RMS[dtype])[torch.randint(4, (24,), generator=generator)]
    uniform = (torch.rand(3, 24, 77, generator=generator) * 2 - 1) * math.sqrt(3)
    grad_output, gate, up = uniform * torch.stack((torch.ones(24), rms[:, 0], rms[:, 1])).unsqueeze(-1)
    return grad_output.to(device, dtype), gate.to(device, dtype), up.to(device, dtype)


def assert_same(ours: Tensor, expected: Tensor, backend: Backend) -> None:
    """Equal bits from Triton; PyTorch's loops over contiguous tensors have another exp than those over views."""
    if backend == "triton":
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected)


def differentiate(function: Callable[..., Tensor], grad_output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad_output))


@pytest.mark.parametrize("dtype", ROW_RMS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_as_exact_as_stock(activation: Activation, dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    skip_if_not_rounded(backend, dtype, device)

    def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        grad_output, gate, up = draw_inputs(torch.Generator().manual_seed(seed), dtype, device)

        def named(function: Callable[..., Tensor], *tensors: Tensor) -> dict[str, Tensor]:
            return dict(zip(("out", "grad_gate", "grad_up"), differentiate(function, *tensors), strict=True))

        ours = named(lambda g, u: glu(g, u, activation=activation, backend=backend), grad_output, gate, up)
        stock = named(lambda g, u: STOCK[activation](g) * u, grad_output, gate, up)
        assert all(t.isfinite().all() for t in stock.values()), "the draw compares nothing"
        oracle = named(lambda g, u: ORACLE[activation](g) * u, grad_output.double(), gate.double(), up.double())
        return ours, stock, oracle

    assert_as_exact(draw, context=f"{backend} {activation} {dtype}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 2 * 77), (2, 3, 2 * 600), (2 * 1500,)], ids=str)
def test_packed_equals_separate(shape: tuple[int, ...], layout: Layout, backend: Backend, device: torch.device) -> None:
    gate_up = torch.randn(shape, device=device)
    gate, up = (half.contiguous() for half in split_packed(gate_up, layout))
    grad_output = torch.randn_like(gate)
    packed = lambda t: glu_packed(t, activation="silu", layout=layout, backend=backend)  # noqa: E731
    out, grad_gate_up = differentiate(packed, grad_output, gate_up)
    expected = differentiate(lambda g, u: glu(g, u, activation="silu", backend=backend), grad_output, gate, up)
    assert grad_gate_up.is_contiguous()
    for ours, separate in zip((out, *split_packed(grad_gate_up, layout)), expected, strict=True):
        assert_same(ours, separate, backend)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A function that gives a tensor of ``shape`` other strides and keeps its values."""
    kind = draw(st.sampled_from(["contiguous", "half", "every_other", "permuted", "offset"]))
    order = draw(st.permutations(range(len(shape))))

    def lay(x: Tensor) -> Tensor:
        if kind == "half":
            return torch.cat((x, x), -1)[..., shape[-1] :]
        if kind == "every_other":
            return torch.stack((x, x), -1)[..., 1]
        if kind == "permuted":
            return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])
        if kind == "offset":
            return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(shape) if x.numel() else x
        return x

    return lay


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_and_strides(data: st.DataObject, backend: Backend, device: torch.device) -> None:
    shape = (*data.draw(st.lists(st.integers(0, 4), max_size=3)), data.draw(st.integers(0, 70)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    activation: Any = data.draw(st.sampled_from(ACTIVATIONS))
    gate, up, grad_output = (torch.randn(shape).to(device, dtype) for _ in range(3))
    function = lambda g, u: glu(g, u, activation=activation, backend=backend)  # noqa: E731
    expected = differentiate(function, grad_output, gate, up)
    lay = [data.draw(strided(shape)) for _ in range(3)]
    got = differentiate(function, lay[0](grad_output), lay[1](gate), lay[2](up))
    for ours, contiguous in zip(got, expected, strict=True):
        assert ours.shape == shape
        assert ours.dtype is dtype
        assert_same(ours, contiguous, backend)
    oracle = differentiate(lambda g, u: ORACLE[activation](g) * u, *(t.double() for t in (grad_output, gate, up)))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    for ours, ref in zip(got, oracle, strict=True):
        torch.testing.assert_close(ours.double(), ref, rtol=tolerance, atol=tolerance)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_destinations_with_gaps(data: st.DataObject, backend: Backend, device: torch.device) -> None:
    """Without autograd: into columns of a larger buffer, as a packed gate_up has them."""
    shape = (*data.draw(st.lists(st.integers(1, 4), max_size=3)), data.draw(st.integers(1, 70)))
    activation: Any = data.draw(st.sampled_from(ACTIVATIONS))
    gate, up, grad_output = (torch.randn(shape).to(device) for _ in range(3))
    out, grad_gate, grad_up = (data.draw(destination(shape, collapses=True)).to(device) for _ in range(3))
    on = primitives_of(backend)
    on.forward(gate, up, activation, out)
    on.backward(grad_output, gate, up, activation, grad_gate=grad_gate, grad_up=grad_up)
    oracle = differentiate(lambda g, u: ORACLE[activation](g) * u, *(t.double() for t in (grad_output, gate, up)))
    for ours, ref in zip((out, grad_gate, grad_up), oracle, strict=True):
        torch.testing.assert_close(ours.double(), ref, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", ["grad_output", "gate", "up"])
def test_inputs_whose_rows_do_not_collapse(transposed: str, backend: Backend, device: torch.device) -> None:
    inputs = {name: torch.randn(2, 3, 8, device=device) for name in ("grad_output", "gate", "up")}
    function = lambda g, u: glu(g, u, activation="silu", backend=backend)  # noqa: E731
    expected = differentiate(function, *inputs.values())
    inputs[transposed] = inputs[transposed].transpose(0, 1).contiguous().transpose(0, 1)
    for got, reference in zip(differentiate(function, *inputs.values()), expected, strict=True):
        assert_same(got, reference, backend)


def test_a_destination_whose_rows_do_not_collapse_is_refused(device: torch.device) -> None:
    pytest.importorskip("triton")
    gate = torch.randn(2, 3, 8, device=device)
    out = torch.empty(3, 2, 8, device=device).transpose(0, 1)
    with pytest.raises(ValueError, match="leading dimensions of an output"):
        primitives_of("triton").forward(gate, gate, "silu", out)


@pytest.mark.parametrize("reduction", [torch.sum, lambda t: t.sum((0, 1))[0], lambda t: t.mean(-1).square().sum()])
def test_expanded_grad_output(reduction: Callable[[Tensor], Tensor], backend: Backend, device: torch.device) -> None:
    gate, up = torch.randn(2, 3, 9, device=device), torch.randn(2, 3, 9, device=device)

    def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        return torch.autograd.grad(reduction(function(*leaves)), leaves)

    ours = gradients(lambda g, u: glu(g, u, activation="silu", backend=backend))
    for got, ref in zip(ours, gradients(lambda g, u: functional.silu(g) * u), strict=True):
        torch.testing.assert_close(got, ref)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_of_the_callers_changes(packed: bool, backend: Backend, device: torch.device) -> None:
    """Backward must not write into what it was given, and a second backward gives the same gradients.

    https://github.com/unslothai/unsloth/issues/5002
    """
    inputs = [torch.randn(3, 10, device=device, requires_grad=True) for _ in range(1 if packed else 2)]
    if packed:
        out = glu_packed(inputs[0], activation="gelu", layout="gate_up", backend=backend)
    else:
        out = glu(*inputs, activation="gelu", backend=backend)
    grad_output = torch.randn_like(out)
    kept = [t.detach().clone() for t in (*inputs, out, grad_output)]
    first = torch.autograd.grad(out, inputs, grad_output, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad_output)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*inputs, out, grad_output), kept, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_keeps_only_its_inputs(packed: bool, backend: Backend, device: torch.device) -> None:
    inputs = [torch.randn(3, 10, device=device, requires_grad=True) for _ in range(1 if packed else 2)]
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        if packed:
            glu_packed(inputs[0], activation="silu", layout="interleaved", backend=backend)
        else:
            glu(*inputs, activation="silu", backend=backend)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in inputs]


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_only_the_asked_gradient(
    wanted: str, backend: Backend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    primitives = primitives_of(backend)
    primitive, destinations = primitives.backward, {}

    def spy(*arguments: Any, **keywords: Any) -> None:
        destinations.update(keywords)
        primitive(*arguments, **keywords)

    monkeypatch.setattr(primitives, "backward", spy)
    leaves = {name: torch.randn(3, 10, device=device, requires_grad=name == wanted) for name in ("gate", "up")}
    glu(**leaves, activation="silu", backend=backend).sum().backward()
    assert [name for name, t in destinations.items() if t is not None] == [f"grad_{wanted}"]
    assert leaves.pop(wanted).grad is not None
    assert next(iter(leaves.values())).grad is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_destination_may_be_an_input(activation: Activation, backend: Backend, device: torch.device) -> None:
    primitives = primitives_of(backend)
    gate, up, grad_output = (torch.randn(3, 600, device=device) for _ in range(3))
    _, grad_gate, grad_up = differentiate(
        lambda g, u: glu(g, u, activation=activation, backend=backend), grad_output, gate, up
    )
    primitives.backward(grad_output, gate, up, activation, grad_gate=grad_output, grad_up=up)
    assert torch.equal(grad_output, grad_gate)
    assert torch.equal(up, grad_up)
    gate_up = torch.randn(3, 1200, device=device)
    gate, up = split_packed(gate_up, "up_gate")
    expected = glu(gate, up, activation=activation, backend=backend)
    primitives.forward(gate, up, activation, gate)
    assert torch.equal(gate_up[:, 600:], expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float16_is_finite_where_stock_is(activation: Activation, backend: Backend, device: torch.device) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/600: the product is formed in float32 and rounded once."""
    values = torch.tensor([-300.0, -200.0, -1.0, 0.5, 200.0, 255.0, 256.0, 300.0], device=device, dtype=torch.float16)
    gate, up = (t.reshape(-1) for t in torch.meshgrid(values, values, indexing="ij"))
    grad_output = torch.full_like(gate, 100)
    ours = differentiate(lambda g, u: glu(g, u, activation=activation, backend=backend), grad_output, gate, up)
    stock = differentiate(lambda g, u: STOCK[activation](g) * u, grad_output, gate, up)
    exact = differentiate(lambda g, u: ORACLE[activation](g) * u, *(t.double() for t in (grad_output, gate, up)))
    for got, theirs, ref in zip(ours, stock, exact, strict=True):
        assert (got.isfinite() >= theirs.isfinite()).all()
        assert torch.equal(got.isfinite(), ref.half().isfinite())  # nor is an overflow hidden
    if activation == "relu2":
        assert ours[0][(gate == 300) & (up == 0.5)].item() == 44992  # 45000 in float16
    if activation == "silu":
        assert ours[0][(gate == 200) & (up == 200)].item() == 40000
        assert ours[0][(gate == 300) & (up == 300)].item() == math.inf


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_is_not_hidden(activation: Activation, backend: Backend, device: torch.device) -> None:
    gate, up = torch.tensor([math.nan, 1.0], device=device), torch.tensor([1.0, math.nan], device=device)
    out, grad_gate, grad_up = differentiate(
        lambda g, u: glu(g, u, activation=activation, backend=backend), torch.ones(2, device=device), gate, up
    )
    assert out.isnan().all()
    assert grad_gate[1].isnan()
    assert grad_up.isnan().tolist() == [True, False]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_infinite_grad_stops_where_relu_is_flat(activation: Activation, backend: Backend, device: torch.device) -> None:
    gate, up = torch.tensor([-1.0, 0.0, 1.0], device=device), torch.ones(3, device=device)
    grad_output = torch.full((3,), math.inf, device=device)
    _, grad_gate, _ = differentiate(
        lambda g, u: glu(g, u, activation=activation, backend=backend), grad_output, gate, up
    )
    assert grad_gate.tolist() == [0.0, 0.0, math.inf]


@pytest.mark.parametrize("gate", [-1e30, 1e30])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid", "quick_gelu"])
def test_saturated_gate(gate: float, activation: Activation, backend: Backend, device: torch.device) -> None:
    x = torch.tensor([gate], device=device)
    one = torch.ones(1, device=device)
    out, _, grad_up = differentiate(lambda g, u: glu(g, u, activation=activation, backend=backend), one, x, one)
    expected = (1.0 if activation == "sigmoid" else gate) if gate > 0 else 0.0
    assert out.item() == grad_up.item() == pytest.approx(expected)


def test_no_second_derivative(backend: Backend, device: torch.device) -> None:
    x = torch.randn(2, 4, device=device, requires_grad=True)
    out = glu(x, x, activation="silu", backend=backend)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_refusals(backend: Backend, device: torch.device) -> None:
    x = torch.randn(2, 4, device=device)
    with pytest.raises(TypeError, match=r"gate is torch\.float16, up is torch\.float32"):
        glu(x.half(), x, activation="silu", backend=backend)
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        glu(x.double(), x.double(), activation="silu", backend=backend)
    with pytest.raises(ValueError, match=r"gate is \(2, 4\), up is \(4,\)"):
        glu(x, x[0], activation="silu", backend=backend)
    with pytest.raises(ValueError, match=r"gate is on .*, up on meta"):
        glu(x, x.to("meta"), activation="silu", backend=backend)
    with pytest.raises(ValueError, match="unknown activation 'mish'"):
        glu(x, x, activation="mish", backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 'cuda'"):
        glu(x, x, activation="silu", backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown layout 'halves'"):
        glu_packed(x, activation="silu", layout="halves", backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"even; got \(2, 3\)"):
        glu_packed(x[:, :3], activation="silu", layout="gate_up", backend=backend)


def test_row_offsets_beyond_int32(backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/803, without touching the memory between the rows."""
    stride = 2**30
    storage = torch.empty(3 * stride + 32, dtype=torch.float16, device=device)
    gate_up = storage.as_strided((4, 32), (stride, 1))
    gate_up.copy_(torch.randn(4, 32))
    near = gate_up.contiguous()
    grad_output = torch.randn(4, 16, device=device).half()
    function = lambda t: glu_packed(t, activation="silu", layout="gate_up", backend=backend)  # noqa: E731
    for far, expected in zip(
        differentiate(function, grad_output, gate_up), differentiate(function, grad_output, near), strict=True
    ):
        assert_same(far, expected, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_element_offsets_beyond_int32(packed: bool, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/803"""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    columns = 2**31 + 8
    gate_up = torch.empty(2 * columns if packed else (2, columns), dtype=torch.bfloat16, device=device).normal_()
    halves = gate_up.view(2, columns)
    ends = torch.cat((halves[:, :64], halves[:, -64:]), 1).clone()
    leaf = gate_up.requires_grad_()
    if packed:
        out = glu_packed(leaf, activation="silu", layout="gate_up", backend="triton")
    else:
        out = glu(leaf[0], leaf[1], activation="silu", backend="triton")
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones((), dtype=out.dtype, device=device).expand(columns))
    expected = differentiate(
        lambda g, u: glu(g, u, activation="silu"), torch.ones(128, dtype=out.dtype, device=device), ends[0], ends[1]
    )
    gradient = gradient.view(2, columns)
    got = (torch.cat((t[:64], t[-64:])) for t in (out, gradient[0], gradient[1]))
    for ours, ref in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.detach(), ref)
