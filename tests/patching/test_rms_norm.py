"""RMSNorm sites: one norm's verdict is no other's, and what was not proved is answered by stock."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

import slothplug
from slothplug.patching.predicates import device_of
from slothplug.patching.served import STATE, Calls
from tests.patching.device import DEVICE, cpu_only

EPSILONS = (0, 0.0, 1e-12, 1e-8, 1e-3, 0.01, 0.5, 1.0, 1, np.float32(1e-5), np.float64(0.02))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Norm(nn.Module):
    """A norm whose attributes decide what it adds to its weight and which float is its eps."""

    def __init__(self, unit_offset: bool = False, eps: float = 1e-6, other: float = 1e-3, size: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.unit_offset, self.other, self.eps = unit_offset, other, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (n * (self.weight.float() + self.unit_offset)).to(x.dtype)


class T5Norm(nn.Module):
    """Rounds to the weight's dtype alone, and only where that is a low one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class GroupNorm(nn.Module):
    def __init__(self, group: int) -> None:
        super().__init__()
        self.group, self.eps = group, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, min(self.group, x.shape[-1])))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).view(x.shape).to(x.dtype)


class WeightlessNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class SecondDimensionNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(2, keepdim=True) + self.eps)
        return (n * self.weight.float()).to(x.dtype)


class CastFirstNorm(Norm):
    """Squares in an operation that autocast takes to a low precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = (x.float().unsqueeze(-2) @ x.float().unsqueeze(-1)).squeeze(-1).float() / x.shape[-1]
        return (x.float() * torch.rsqrt(square + self.eps) * self.weight.float()).to(x.dtype)


def fuse(*norms: nn.Module) -> tuple[nn.Module, slothplug.Report]:
    model = nn.Sequential(*norms)
    return model, slothplug.patch(model, {"ops": ["rms_norm"], "backend": "torch"})


def calls(module: nn.Module) -> Calls:
    found: Calls = module.__dict__[STATE].calls
    return found


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scales = torch.tensor([1e-3, 1.0, 1e3]).repeat(shape[-2])[: shape[-2], None]
    return (torch.randn(*shape) * scales).to(dtype)


def assert_stock(module: nn.Module, stock: nn.Module, x: torch.Tensor) -> None:
    got, expected = module(x), stock(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-6 if got.dtype is torch.float32 else 0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "attributes",
    [
        [{"unit_offset": False}, {"unit_offset": True}],
        [{"eps": 1e-6, "other": 1e-3}, {"eps": 1e-3, "other": 1e-6}],
        [{"eps": 1e-6, "other": 1e-6}],
    ],
    ids=["offset", "swapped", "equal"],
)
def test_norms_of_one_class_are_told_apart_by_their_attributes(attributes: list[dict[str, Any]]) -> None:
    norms = [Norm(**each) for each in attributes]
    stock = copy.deepcopy(norms)
    _, report = fuse(*norms)
    assert len(report.fused) == len(norms)
    for fast, slow in zip(norms, stock, strict=True):
        assert_stock(fast, slow, rows(2, 6, 32))
        assert calls(fast).served == 1


def test_attributes_changed_after_the_patch_are_heeded() -> None:
    norm = Norm(other=1e-6)
    stock = copy.deepcopy(norm)
    fuse(norm)
    norm.eps = stock.eps = 1.0
    assert_stock(norm, stock, rows(2, 6, 32))
    assert calls(norm).served == 1
    norm.unit_offset = stock.unit_offset = True
    assert_stock(norm, stock, rows(2, 6, 32))
    assert sum(calls(norm).fallbacks.values()) == 1


def test_a_copy_is_served() -> None:
    norm = Norm()
    norm.sizes = [32]
    stock = copy.deepcopy(norm)
    model, _ = fuse(norm)
    double = copy.deepcopy(model)[0]
    assert_stock(double, stock, rows(2, 6, 32))
    assert calls(double).served == 1
    assert not calls(double).fallbacks


@pytest.mark.parametrize("eps", EPSILONS, ids=repr)
def test_every_eps_is_served(eps: Any) -> None:
    norm = Norm(eps=eps, other=2)
    stock = copy.deepcopy(norm)
    model, report = fuse(norm)
    assert report.fused
    x = torch.cat((rows(1, 6, 32), torch.zeros(1, 1, 32), torch.full((1, 1, 32), 1e-7)), 1)
    for module, original in ((model, nn.Sequential(stock)), (norm, stock)):
        assert_stock(module, original, x)
    assert calls(norm).served == 2


@pytest.mark.parametrize("eps", EPSILONS, ids=repr)
def test_an_eps_set_after_the_patch_is_used(eps: Any) -> None:
    norm = Norm()
    stock = copy.deepcopy(norm)
    model, _ = fuse(norm)
    model(rows(2, 6, 32))
    norm.eps = stock.eps = eps
    for _ in range(3):
        assert_stock(model, nn.Sequential(stock), rows(2, 6, 32))
    assert calls(norm).served == 4


def test_rows_of_zeros_train_as_in_stock_with_eps_0() -> None:
    """0 / 0: output and gradients are NaN where they are NaN in stock, and finite in all other rows."""
    norm = Norm(eps=0.0)
    stock = copy.deepcopy(norm)
    fuse(norm)
    outputs, gradients = [], []
    for module in (norm, stock):
        torch.manual_seed(0)
        x = torch.cat((rows(6, 32), torch.zeros(1, 32))).requires_grad_()
        y = module(x)
        outputs.append(y)
        gradients.append(torch.autograd.grad((y * torch.randn(7, 32)).sum(), [x, module.weight]))
    torch.testing.assert_close(*outputs, equal_nan=True)
    assert outputs[0].isnan().any(-1).tolist() == [False] * 6 + [True]
    for got, expected in zip(*gradients, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())


def test_an_eps_that_the_forward_replaces_is_not_taken_for_its_own() -> None:
    class AtLeast(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + max(self.eps, 1e-11))
            return (n * self.weight.float()).to(x.dtype)

    with pytest.warns(slothplug.NothingFusedWarning):
        assert not fuse(AtLeast(eps=0.0))[1].fused


def with_tensor(norm: Norm) -> None:
    norm.eps = torch.tensor(1e-6)  # type: ignore[assignment]


def with_buffer(norm: Norm) -> None:
    del norm.eps
    norm.register_buffer("eps", torch.tensor(1e-6))


class RMSNorm(Norm):
    """Of a name that says what it is."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_tensor, "its forward reads eps, a Tensor, whose changes would go unnoticed"),
        (with_buffer, "it has submodules or buffers (eps)"),
    ],
)
def test_an_eps_that_is_a_tensor_is_left_with_that_reason(change: Any, reason: str) -> None:
    norm = RMSNorm()
    change(norm)
    with pytest.warns(slothplug.NothingFusedWarning):
        report = fuse(norm)[1]
    assert [site.reason for site in report.left] == [reason]


def test_an_eps_that_becomes_a_tensor_falls_back() -> None:
    norm = Norm()
    stock = copy.deepcopy(norm)
    model, _ = fuse(norm)
    model(rows(2, 6, 32))
    norm.eps = stock.eps = torch.tensor(0.1)  # type: ignore[assignment]
    for _ in range(3):
        assert_stock(model, nn.Sequential(stock), rows(2, 6, 32))
    assert calls(norm).served == 1
    assert calls(norm).fallbacks == {"its eps is no number any more": 3}


@pytest.mark.parametrize("group", [16, 32, 64, 128, 512])
def test_a_norm_of_groups_is_not_taken_for_one_of_rows(group: int) -> None:
    with pytest.warns(slothplug.NothingFusedWarning):
        _, report = fuse(GroupNorm(group))
    assert not report.fused


@cpu_only  # where no tensor of the model says otherwise, it is taken to be on the CPU
def test_a_norm_without_weight_is_served_at_every_width() -> None:
    norm = WeightlessNorm()
    stock = copy.deepcopy(norm)
    fuse(norm)
    for width in (64, 96, 128):
        assert_stock(norm, stock, rows(2, 6, width))
    assert calls(norm).served == 3


def test_a_norm_of_the_second_dimension_is_left() -> None:
    with pytest.warns(slothplug.NothingFusedWarning):
        _, report = fuse(SecondDimensionNorm())
    assert not report.fused


@pytest.mark.parametrize("shape", [(6, 32), (2, 6, 32), (2, 3, 6, 32), (1, 2, 3, 6, 32)])
def test_only_proved_numbers_of_dimensions_are_served(shape: tuple[int, ...]) -> None:
    norm = Norm()
    stock = copy.deepcopy(norm)
    fuse(norm)
    assert_stock(norm, stock, rows(*shape))
    assert calls(norm).served == (len(shape) < 5)


@pytest.mark.parametrize("norm_class", [Norm, T5Norm])
@pytest.mark.parametrize("patched_in", FLOATS, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_pair_of_dtypes_gives_what_stock_gives(
    norm_class: type[nn.Module], patched_in: torch.dtype, autocast: bool
) -> None:
    norm = norm_class().to(patched_in)
    stock = copy.deepcopy(norm)
    fuse(norm)
    for weight_dtype in FLOATS:
        norm.to(weight_dtype), stock.to(weight_dtype)
        for dtype in FLOATS:
            before = calls(norm).served
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                assert_stock(norm, stock, rows(2, 6, 32, dtype=dtype))
            if dtype is weight_dtype:
                assert calls(norm).served == before + 1


def test_a_norm_that_autocast_changes_is_not_served_under_autocast() -> None:
    norm = CastFirstNorm()
    stock = copy.deepcopy(norm)
    fuse(norm)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_stock(norm, stock, rows(2, 6, 32))
    assert calls(norm).served == 0
    norm(rows(2, 6, 32))
    assert calls(norm).served == 1


def test_a_norm_whose_forward_was_replaced_is_left_with_that_reason() -> None:
    norm = Norm()
    norm.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(slothplug.NothingFusedWarning):
        _, report = fuse(norm)
    assert [site.reason for site in report.left] == ["its forward was replaced on the instance by somebody else"]


def test_a_norm_without_a_weight_is_served_where_its_model_is() -> None:
    model = nn.Sequential(Llama4TextL2Norm(1e-6), nn.Linear(16, 16)).to(DEVICE)
    report = slothplug.patch(model, {"ops": ["rms_norm"]})
    model(torch.randn(2, 16, device=DEVICE))
    (site,) = report.fused
    assert site.calls.served == 1
    assert model[0].__dict__[STATE].device_type == torch.device(DEVICE).type
    on_meta = nn.Sequential(Llama4TextL2Norm(1e-6), nn.Linear(16, 16, device="meta"))
    assert device_of(on_meta[0], on_meta).type == "meta"
    assert device_of(on_meta[0]).type == "cpu"
