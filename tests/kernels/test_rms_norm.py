"""RMSNorm against float64 and against the modules of transformers, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slothplug.exactness import assert_as_exact
from slothplug.kernels.backend import Backend
from slothplug.kernels.rms_norm import rms_norm
from slothplug.kernels.row_layout import merge_rows, row_order
from tests.kernels.strided import strided

Tensors = dict[str, torch.Tensor]


class ZeroCenteredBeforeWeight(nn.Module):
    """The zero-centred weight in Llama's order: 1 + w in the weight's dtype. Stock eager code."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(hidden)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return n.to(x.dtype) * (1 + self.weight)


class Weightless(nn.Module):
    """x / rms(x), rounded once (HrmTextRMSNorm and others). Stock eager code."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = None, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


VARIANTS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "llama": (LlamaRMSNorm, {"casting": "before_weight"}),
    "helium": (HeliumRMSNorm, {"casting": "after_weight"}),
    "gemma": (GemmaRMSNorm, {"casting": "after_weight", "offset": 1.0}),
    "zero_centered": (ZeroCenteredBeforeWeight, {"casting": "before_weight", "offset": 1.0}),
    "weightless": (Weightless, {}),
}


def oracle(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    """The formula in float64."""
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight + offset)


def with_gradients(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None, g: torch.Tensor
) -> Tensors:
    """The output and the gradients of each input of ``function(x, weight)``, for the output's gradient ``g``."""
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = function(x, weight)
    y.backward(g.to(y.dtype))
    found = {"y": y, "dx": x.grad}
    return found if weight is None else {**found, "dweight": weight.grad}


def stock_of(module: nn.Module) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        parameters = {} if weight is None else {"weight": weight}
        return torch.func.functional_call(module, parameters, (x,))

    return function


def rows_of_all_sizes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of root mean square 1e-3, 1 and 1e3."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (3 * torch.randint(-1, 2, (*shape[:-1], 1), generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("weight_dtype", ["same", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_exact_as_stock(
    variant: str, weight_dtype: str, backend: Backend, dtype: torch.dtype, device: torch.device
) -> None:
    if weight_dtype == "float32" and (dtype is torch.float32 or variant == "weightless"):
        pytest.skip("the same as the case 'same'")
    cls, options = VARIANTS[variant]
    module, offset = cls(80, eps=1e-6).to(device), options.get("offset", 0.0)

    def draw(seed: int) -> tuple[Tensors, Tensors, Tensors]:
        x = rows_of_all_sizes((11, 80), dtype, seed).to(device)
        weight = None
        if variant != "weightless":
            weight = torch.randn(80) if offset == 0 else 0.2 * torch.randn(80)
            weight = weight.to(device, dtype if weight_dtype == "same" else torch.float32)
        # Exact in every dtype, so that the oracle and stock are given the same gradient.
        g = torch.randn(11, 80).bfloat16().to(device, dtype)
        ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend, **options), x, weight, g)
        stock = with_gradients(stock_of(module), x, weight, g)
        # In Llama's order the weight that stock means is 1 + w after rounding; its error belongs to neither.
        rounded, left = weight, offset
        if offset and options["casting"] == "before_weight":
            rounded, left = weight + offset, 0.0
        exact = with_gradients(
            lambda x, w: oracle(x, w, 1e-6, left), x.double(), None if rounded is None else rounded.double(), g.double()
        )
        return ours, stock, exact

    torch.manual_seed(0)
    assert_as_exact(draw, context=f"{variant} {backend}")


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("weight_value", ["0", "u", "2u"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_round_as_their_module_does(
    variant: str, weight_value: str, eps: float, backend: Backend, dtype: torch.dtype, device: torch.device
) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/74: Gemma's 1 + w added in bfloat16 loses w = 0.00390625 = u."""
    u = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    cls, options = VARIANTS[variant]
    x = rows_of_all_sizes((6, 64), dtype, seed=1).to(device)
    weight = torch.full((64,), {"0": 0.0, "u": u, "2u": 2 * u}[weight_value]).to(device, dtype)
    ours = rms_norm(x, None if variant == "weightless" else weight, eps, backend=backend, **options)
    stock = stock_of(cls(64, eps=eps).to(device, dtype))(x, None if variant == "weightless" else weight)
    ulps = (ours.double() - stock.double()).abs() / (2 * u * stock.double().abs()).clamp_min(1e-30)
    # A unit in the last place; float32 sums in another order, hence a few.
    assert ulps.max() <= (4 if dtype is torch.float32 else 1)
    assert ours.dtype is stock.dtype


def test_gemma_keeps_a_weight_below_the_roundoff(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/1462: the 1 is added in float32, so w = u moves some outputs."""
    if dtype is torch.float32:
        pytest.skip("float32 has no wider sum")
    u = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    x = rows_of_all_sizes((6, 64), dtype, seed=2).to(device)
    zero, tiny = torch.zeros(64, device=device, dtype=dtype), torch.full((64,), u, device=device, dtype=dtype)
    gemma = {"offset": 1.0, "casting": "after_weight", "backend": backend}
    assert not torch.equal(rms_norm(x, zero, 1e-6, **gemma), rms_norm(x, tiny, 1e-6, **gemma))


def test_float16_rows_near_the_largest_number(backend: Backend, device: torch.device) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/600: 6e4 squared overflows float16, stock's float32 does not."""
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    found = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend), x, weight, torch.ones_like(x))
    assert all(t.isfinite().all() for t in found.values())
    torch.testing.assert_close(found["y"], torch.ones_like(x))


@pytest.mark.parametrize("hidden", [1, 3, 80, 5120, 65537])
def test_every_hidden_size(hidden: int, backend: Backend, device: torch.device) -> None:
    """https://github.com/unslothai/unsloth/issues/19: rows longer than one block of 65536 lanes were refused."""
    torch.manual_seed(hidden)
    x, g = torch.randn(3, hidden, device=device), torch.randn(3, hidden, device=device)
    weight = torch.randn(hidden, device=device)
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-5, backend=backend), x, weight, g)
    exact = with_gradients(lambda x, w: oracle(x, w, 1e-5), x.double(), weight.double(), g.double())
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("hidden", [64, 8200])
def test_more_rows_than_partial_sums(
    hidden: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Programs that merged several tiles of rows, the last one in part, sum each row once."""
    triton_rms_norm = pytest.importorskip("slothplug.kernels.triton.rms_norm")
    monkeypatch.setattr(triton_rms_norm, "_tile", lambda h: None if h > 64 else triton_rms_norm.Tile(64, 2, 1, 3))
    monkeypatch.setattr(triton_rms_norm, "_WIDE_PARTIAL_SUMS", 3)
    # Plans of the table's knobs, and afterwards those of this test's.
    triton_rms_norm._backward_plan.cache_clear()
    request.addfinalizer(triton_rms_norm._backward_plan.cache_clear)
    torch.manual_seed(0)
    x, g = torch.randn(17, hidden, device=device), torch.randn(17, hidden, device=device)
    weight = torch.randn(hidden, device=device)
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-5, backend="triton"), x, weight, g)
    exact = with_gradients(lambda x, w: oracle(x, w, 1e-5), x.double(), weight.double(), g.double())
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_trains", [True, False])
@pytest.mark.parametrize("x_trains", [True, False])
def test_gradients_are_those_asked_for(
    x_trains: bool, weight_trains: bool, backend: Backend, device: torch.device
) -> None:
    """https://github.com/unslothai/unsloth/pull/4550: dweight was lost, and the gradient handed in was overwritten."""
    if not x_trains and not weight_trains:
        assert not rms_norm(torch.ones(2, 8, device=device), None, 1e-6, backend=backend).requires_grad
        return
    x = torch.randn(5, 8, device=device, requires_grad=x_trains)
    weight = torch.randn(8, device=device, requires_grad=weight_trains)
    y = rms_norm(x, weight, 1e-6, backend=backend)
    g = torch.randn_like(y)
    untouched = [t.detach().clone() for t in (x, weight, g)]
    destinations: list[dict[str, Any]] = []
    node = y.grad_fn
    backward = node.primitives.backward

    class Recorder:
        @staticmethod
        def backward(*args: Any, **keywords: Any) -> None:
            destinations.append(keywords)
            backward(*args, **keywords)

    node.primitives = Recorder
    y.backward(g)
    given = {name for name, destination in destinations[0].items() if destination is not None}
    assert given == {name for name, trains in (("grad_x", x_trains), ("grad_weight", weight_trains)) if trains}
    assert (x.grad is not None, weight.grad is not None) == (x_trains, weight_trains)
    for before, after in zip(untouched, (x, weight, g), strict=True):
        assert torch.equal(before, after)


def test_backward_twice_gives_the_same_bits(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(40, 80, device=device).to(dtype).requires_grad_()
    weight = torch.randn(80, device=device).to(dtype).requires_grad_()
    y = rms_norm(x, weight, 1e-6, backend=backend)
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, weight), g, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), g, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (2, 1, 1, 3, 0), (1, 2, 0, 1, 8)])
def test_nothing_to_normalise(shape: tuple[int, ...], backend: Backend, device: torch.device) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], device=device, requires_grad=True)
    y = rms_norm(x, weight, 1e-6, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_qk_norm_reads_a_transposed_view_without_a_copy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, H, T, D] as a view of [B, T, H, D]: one row stride, and outputs of the view's strides."""
    triton_rms_norm = pytest.importorskip("slothplug.kernels.triton.rms_norm")
    x = torch.randn(2, 5, 3, 64, device=device).transpose(1, 2)
    order = row_order(x.stride())
    assert merge_rows(order, x.shape, x.stride()) == (30, (1, 1), ((64, 0, 0),))
    other = torch.randn(2, 3, 5, 64, device=device)
    assert merge_rows(order, x.shape, other.stride(), x.stride()).strides[0] == (960, 64, 320)
    pointers: list[int] = []
    launch = triton_rms_norm.launch

    def record(plan: Any, device: torch.device, *tensors: torch.Tensor | None) -> None:
        pointers.extend(tensor.data_ptr() for tensor in tensors if tensor is not None)
        launch(plan, device, *tensors)

    monkeypatch.setattr(triton_rms_norm, "launch", record)
    y = rms_norm(x.requires_grad_(), torch.ones(64, device=device), 1e-6, backend="triton")
    y.backward(other)
    assert y.stride() == x.stride() == x.grad.stride()
    assert {x.data_ptr(), y.data_ptr(), other.data_ptr(), x.grad.data_ptr()} <= set(pointers)


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_strides(data: st.DataObject) -> None:
    shape = (*data.draw(st.lists(st.integers(1, 3), max_size=5)), data.draw(st.integers(1, 40)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, g = data.draw(strided(shape)).to(device), data.draw(strided(shape)).to(device)
    weight = torch.randn(2 * shape[-1], device=device)[::2] if data.draw(st.booleans()) else None
    offset = data.draw(st.sampled_from([0.0, 1.0]))
    exact = with_gradients(
        lambda x, w: oracle(x, w, 1e-5, offset), x.double(), None if weight is None else weight.double(), g.double()
    )
    for backend in ("torch", "triton"):
        ours = with_gradients(lambda x, w, b=backend: rms_norm(x, w, 1e-5, offset=offset, backend=b), x, weight, g)
        for name, value in ours.items():
            # One element a row makes dx = rstd^3 eps g w out of a difference of two numbers of size rstd g w.
            torch.testing.assert_close(value.double(), exact[name], rtol=2e-5, atol=2e-4 if shape[-1] == 1 else 2e-5)


def test_saved_tensors_may_come_back_with_other_strides(backend: Backend, device: torch.device) -> None:
    """Activation offloading packs and unpacks what is saved: large tensors only, and it need not keep strides."""
    x = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
    weight, g = torch.randn(8, device=device), torch.randn(2, 3, 5, 8, device=device)
    plain = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend), x, weight, g)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous() if t.numel() > 100 else t, lambda t: t):
        offloaded = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend), x, weight, g)
    torch.testing.assert_close(offloaded, plain)


def test_offsets_beyond_32_bits(backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/803, cheaply: three rows, the last 2^31 elements from the first.

    Memory that is never touched is never given by the system, so that this costs pages, not 4 GiB, on a CPU.
    """
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    x, g = storage.as_strided((3, 32), (2**30, 1)), storage.as_strided((3, 32), (2**30, 1), 32)
    x.normal_()
    g.normal_()
    weight = torch.randn(32, device=device).half()
    far = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend), x, weight, g)
    near = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend=backend), x.contiguous(), weight, g.contiguous())
    assert all(torch.equal(far[name], near[name]) for name in near)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/803 at its own size: bfloat16 [524289, 4096], 4.3 GB a tensor."""
    x = torch.randn(524289, 4096, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(4096, device=device, dtype=torch.bfloat16)
    g = torch.randn_like(x)
    y = rms_norm(x, weight, 1e-6, backend="triton")
    y.backward(g)
    for row in (0, -1):
        alone = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, backend="triton"), x[row], weight, g[row])
        assert torch.equal(alone["y"], y[row])
        assert torch.equal(alone["dx"], x.grad[row])


def test_refuses_what_it_cannot_do(backend: Backend, device: torch.device) -> None:
    x = torch.ones(2, 8, device=device)
    with pytest.raises(TypeError, match="float64"):
        rms_norm(x.double(), None, 1e-6, backend=backend)
    with pytest.raises(ValueError, match="cannot scale"):
        rms_norm(x, torch.ones(4, device=device), 1e-6, backend=backend)
    with pytest.raises(ValueError, match="casting"):
        rms_norm(x, None, 1e-6, casting="sideways", backend=backend)
    with pytest.raises(ValueError, match="backend"):
        rms_norm(x, None, 1e-6, backend="abacus")
