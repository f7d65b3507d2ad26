"""Gated MLP sites: what is served trains with stock's numbers; what only looks like one is left, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import slothplug
from slothplug.kernels.glu import glu
from slothplug.ops.glu.gated_mlp import GatedMLP
from slothplug.patching.served import STATE
from slothplug.patching.sites import Kernel
from tests.backward_calls import count_backward
from tests.patching.architectures import ARCHITECTURES, IDS, assert_same_step, step, tiny

NO_GATE = {"gpt_neox"}


class Gated(nn.Module):
    """A gated MLP whose parts the tests exchange."""

    def __init__(self, hidden: int = 32, intermediate: int = 48, bias: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, intermediate, bias=bias)
        self.second = nn.Linear(hidden, intermediate, bias=bias)
        self.third = nn.Linear(intermediate, hidden, bias=bias)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.silu(self.first(x)) * self.second(x))


class Packed(nn.Module):
    def __init__(self, split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.both = nn.Linear(32, 96, bias=True)
        self.down = nn.Linear(48, 32)
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(self.both(x))
        return self.down(functional.silu(gate) * up)


def glu_report(model: nn.Module, **settings: Any) -> slothplug.Report:
    report = slothplug.patch(model, {"ops": ["glu"], **settings})
    count_backward(report)
    return report


def learnt(module: nn.Module) -> GatedMLP:
    mlp: GatedMLP = module.__dict__[STATE].spec
    return mlp


def grads(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    output = module(*inputs)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_trains_as(module: nn.Module, stock: nn.Module, x: torch.Tensor) -> None:
    for got, expected in zip(grads(module, x), grads(stock, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_every_gradient_equal_stock(architecture: str) -> None:
    model, stock = tiny(architecture), tiny(architecture)
    if architecture in NO_GATE:
        with pytest.warns(slothplug.NothingFusedWarning):
            assert not glu_report(model).sites
        return
    report = glu_report(model)
    assert_same_step(step(model), step(stock))
    assert report.fused
    assert not report.left
    for site in report.fused:
        assert site.calls.served, site.name
        assert site.calls.backward, site.name
        assert not site.calls.fallbacks, site.name


@pytest.mark.parametrize(
    ("split", "layout"),
    [
        (lambda z: z.chunk(2, -1), "gate_up"),
        (lambda z: z.chunk(2, -1)[::-1], "up_gate"),
        (lambda z: (z[..., 0::2], z[..., 1::2]), "interleaved"),
    ],
)
def test_packed_layouts_are_recognised(split: Callable[..., Any], layout: str) -> None:
    module = Packed(split)
    stock = copy.deepcopy(module)
    assert glu_report(nn.Sequential(module)).fused
    assert learnt(module).layout == layout
    assert_trains_as(module, stock, torch.randn(2, 5, 32))


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (functional.silu, "silu"),
        (functional.gelu, "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (torch.relu, "relu"),
        (lambda z: torch.relu(z) ** 2, "relu2"),
        (nn.Sigmoid(), "sigmoid"),
        (lambda z: z * torch.sigmoid(1.702 * z), "quick_gelu"),
    ],
)
def test_activations_are_told_apart(activation: Callable[..., Any], expected: str) -> None:
    class Activated(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.act(self.first(x)) * self.second(x))

    module = Activated(act=activation, bias=True)
    stock = copy.deepcopy(module)
    assert glu_report(nn.Sequential(module)).fused
    assert learnt(module).activation == expected
    assert_trains_as(module, stock, torch.randn(2, 5, 32))


def test_layers_are_called_in_stocks_order() -> None:
    """Adapters draw their dropout masks in the order of the calls."""

    class UpFirst(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.first(x)
            return self.third(up * functional.silu(self.second(x)))

    module, order = UpFirst(), []
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_, name=name: order.append(name))
    assert glu_report(nn.Sequential(module)).fused
    assert (learnt(module).gate, learnt(module).up) == ("second", "first")
    module(torch.randn(3, 32))
    assert order == ["first", "second", "third"]


def test_a_forward_that_reads_its_real_widths_is_recognised() -> None:
    module = Packed(lambda z: (z[..., :48], z[..., 48:96]))
    stock = copy.deepcopy(module)
    assert glu_report(nn.Sequential(module)).fused
    assert_trains_as(module, stock, torch.randn(2, 5, 32))


class Clamped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.silu(self.first(x).clamp(max=7.0)) * self.second(x))


class Multiplied(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.silu(self.first(x) * self.multiplier) * self.second(x))


class Residual(Gated):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.third(functional.silu(self.first(x)) * self.second(x))


class Adds(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.third(functional.silu(self.first(x)) * self.second(x))


class Pair(Gated):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.third(functional.silu(self.first(x)) * self.second(x)), None


class Drops(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.dropout(functional.silu(self.first(x)) * self.second(x)))


class FunctionalDropout(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.silu(self.first(x)) * self.second(x)
        return self.third(functional.dropout(h, 0.1, training=self.training))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Clamped(), "computes something else"),
        (Multiplied(multiplier=0.9), "computes something else"),
        (Residual(), "does not run on hidden states alone"),
        (Adds(), "returns something else"),
        (Pair(), "returns something else"),
        (Drops(dropout=nn.Dropout(0.1)), "dropout between its layers"),
        (Drops(dropout=nn.Dropout(0.1)).eval(), "dropout between its layers"),
        (FunctionalDropout().eval(), "computes something else"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_only_looks_like_a_gated_mlp_is_left_with_the_reason(module: nn.Module, reason: str) -> None:
    with pytest.warns(slothplug.NothingFusedWarning):
        report = glu_report(nn.Sequential(module))
    assert [site.status for site in report.sites] == ["left"]
    assert reason in report.left[0].reason


def test_two_modules_of_one_class_are_told_apart_by_their_attributes() -> None:
    model = nn.Sequential(Multiplied(multiplier=1.0), Multiplied(multiplier=2.0))
    report = glu_report(model)
    assert [site.name for site in report.fused] == ["0"]
    assert [site.name for site in report.left] == ["1"]


def test_plain_mlps_and_attentions_are_no_sites() -> None:
    class Attention(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.first(x), self.second(x), self.third(x)
            return functional.scaled_dot_product_attention(q, k, v)

    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    with pytest.warns(slothplug.NothingFusedWarning):
        assert not glu_report(nn.Sequential(plain, Attention(16, 16))).sites


def test_dropout_that_is_switched_on_later_falls_back() -> None:
    module = Drops(dropout=nn.Dropout(0.0))
    stock = copy.deepcopy(module)
    report = glu_report(nn.Sequential(module))
    x = torch.randn(4, 32)
    assert torch.allclose(module(x), stock(x), atol=1e-6)
    module.dropout.p = stock.dropout.p = 0.5
    torch.manual_seed(3)
    got = module(x)
    torch.manual_seed(3)
    assert torch.equal(got, stock(x))
    assert report.fused[0].calls.fallbacks == {"dropout in dropout": 1}


def test_a_hook_on_the_activation_is_heard() -> None:
    class Activated(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.act(self.first(x)) * self.second(x))

    module, heard = Activated(act=nn.SiLU()), []
    report = glu_report(nn.Sequential(module))
    handle = module.act.register_forward_hook(lambda *_: heard.append(True))
    module(torch.randn(4, 32))
    handle.remove()
    module(torch.randn(4, 32))
    assert heard == [True]
    assert report.fused[0].calls.served == 1
    assert report.fused[0].calls.fallbacks == {"hooks on act": 1}


def test_unequal_dtypes_are_finished_eagerly_without_a_second_call() -> None:
    module, calls = Gated(), []
    report = glu_report(nn.Sequential(module))
    module.second.register_forward_hook(lambda layer, args, out: calls.append(1) or out.double())
    module.third.double()
    x = torch.randn(4, 32)
    expected = functional.silu(module.first(x)) * functional.linear(x, module.second.weight).double()
    assert torch.allclose(module(x), functional.linear(expected, module.third.weight))
    assert calls == [1]
    assert list(report.fused[0].calls.fallbacks.values()) == [1]


def test_other_arguments_and_tensors_go_to_the_original_forward() -> None:
    module = Gated()
    report = glu_report(nn.Sequential(module))
    x = torch.randn(4, 32)
    assert torch.equal(module(x=x), module.third(functional.silu(module.first(x)) * module.second(x)))
    assert module(x[:0]).shape == (0, 32)
    assert report.fused[0].calls.fallbacks.total() == 1


def test_adapters_keep_their_forward_and_draw_their_masks_as_in_stock() -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.lora import LoraLayer

    def make() -> nn.Module:
        config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=["gate_proj", "up_proj", "down_proj"])
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny("llama"), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model.train()

    model, stock = make(), make()
    report = glu_report(model)
    assert isinstance(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj"), LoraLayer)
    assert_same_step(step(model), step(stock))
    assert all(site.calls.backward for site in report.fused)
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    for changed in (model, stock):
        changed.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)


def test_copies_train_their_own_weights() -> None:
    module = Gated()
    glu_report(nn.Sequential(module))
    duplicate = copy.deepcopy(module)
    with torch.no_grad():
        duplicate.first.weight.mul_(2)
    x = torch.randn(4, 32)
    expected = functional.silu(2 * module.first(x)) * module.second(x)
    assert torch.allclose(duplicate(x), module.third(expected), atol=1e-5)


def test_a_kernel_that_computes_something_else_is_refused() -> None:
    class Wrong:
        @slothplug.hookimpl
        def slothplug_kernel(self, operation: str) -> Kernel | None:
            def doubled(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
                return glu(gate, up, activation=activation) * 1.001  # type: ignore[arg-type]

            return Kernel("doubled", "test", doubled) if operation == "glu" else None

    manager = slothplug.plugin_manager()
    plugin = Wrong()
    manager.register(plugin)
    try:
        with pytest.warns(slothplug.NothingFusedWarning):
            report = glu_report(nn.Sequential(Gated()))
    finally:
        manager.unregister(plugin)
    assert "differs from the original" in report.left[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_modules_are_proved_in_their_dtype(dtype: torch.dtype) -> None:
    module = Gated(bias=True).to(dtype)
    assert glu_report(nn.Sequential(module)).fused
    x = torch.randn(4, 32, dtype=dtype)
    expected = module.third(functional.silu(module.first(x)) * module.second(x))
    torch.testing.assert_close(module(x), expected, rtol=2e-2, atol=2e-2)


def test_weights_of_different_dtypes_are_left() -> None:
    module = Gated().bfloat16()
    module.third.float()
    with pytest.warns(slothplug.NothingFusedWarning):
        report = glu_report(nn.Sequential(module))
    assert "different dtypes" in report.left[0].reason


def test_finding_sites_touches_no_random_state_and_no_gradient() -> None:
    model = tiny("llama")
    step(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    glu_report(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])
