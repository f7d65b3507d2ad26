"""What a forward reads beside its tensors: a change of it after the patch is answered as stock answers it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN

import slothplug
from slothplug.patching.served import STATE, Calls

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "gelu": functional.gelu}
EPS = 1e-6


class MLP(nn.Module):
    """A gated MLP; subclasses find its activation elsewhere."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.config.hidden_act](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FromACT2FN(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACT2FN[self.config.hidden_act](x)


class FromItem(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.config["hidden_act"]](x)


class FromFirst(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.config[0]](x)


class FromNested(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.config.text.hidden_act](x)


class FromProperty(MLP):
    @property
    def chosen(self) -> str:
        return str(self.config.hidden_act)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.chosen](x)


class FromClass(MLP):
    hidden_act = "silu"

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.hidden_act](x)


class FromGetattr(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[getattr(self, "hidden_act", "silu")](x)


def chosen_in(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACTIVATIONS[config.hidden_act]


class FromFunction(MLP):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return chosen_in(self.config)(x)


class Aliased(LlamaConfig):
    attribute_map: ClassVar[dict[str, str]] = {"hidden_act": "activation_function"}

    def __init__(self) -> None:
        super().__init__()
        self.activation_function = "silu"


@dataclass
class Fields:
    hidden_act: str = "silu"


class Answers:
    """A configuration that computes what is read from it."""

    def __init__(self) -> None:
        self.kind = "silu"

    @property
    def hidden_act(self) -> str:
        return self.kind


def set_field(mlp: Any) -> None:
    mlp.config.hidden_act = "gelu"


CHANGES: list[tuple[Callable[[], MLP], Callable[[Any], None]]] = [
    (lambda: MLP(SimpleNamespace(hidden_act="silu")), set_field),
    (lambda: MLP(Fields()), set_field),
    (lambda: MLP(LlamaConfig()), set_field),
    (lambda: MLP(Aliased()), set_field),
    (lambda: MLP(Answers()), lambda mlp: setattr(mlp.config, "kind", "gelu")),
    (lambda: FromACT2FN(LlamaConfig()), set_field),
    (lambda: FromFunction(LlamaConfig()), set_field),
    (lambda: FromProperty(LlamaConfig()), set_field),
    (lambda: FromItem({"hidden_act": "silu"}), lambda mlp: mlp.config.update(hidden_act="gelu")),
    (lambda: FromFirst(["silu"]), lambda mlp: mlp.config.__setitem__(0, "gelu")),
    (
        lambda: FromNested(SimpleNamespace(text=SimpleNamespace(hidden_act="silu"))),
        lambda mlp: setattr(mlp.config.text, "hidden_act", "gelu"),
    ),
    (FromClass, lambda mlp: setattr(mlp, "hidden_act", "gelu")),
    (FromGetattr, lambda mlp: setattr(mlp, "hidden_act", "gelu")),
]
IDS = [
    "namespace", "dataclass", "configuration", "attribute map", "property of it", "ACT2FN", "function", "property",
    "dictionary", "list", "nested", "class attribute", "getattr",
]  # fmt: skip


def calls(module: nn.Module) -> Calls:
    found: Calls = module.__dict__[STATE].calls
    return found


def fuse(*modules: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """A model of the modules, patched, and its copy from before."""
    model = nn.Sequential(*modules)
    stock = copy.deepcopy(model)
    slothplug.patch(model, {"ops": ["glu", "rms_norm"], "backend": "torch"})
    return model, stock


def assert_stock(model: nn.Module, stock: nn.Module, served: bool) -> None:
    """Calls the model, and its first module by itself."""
    x = torch.randn(4, 16)
    for got, expected in ((model, stock), (model[0], stock[0])):  # type: ignore[index]
        before = calls(model[0]).served  # type: ignore[index]
        torch.testing.assert_close(got(x), expected(x), rtol=0 if not served else 1e-5, atol=0 if not served else 1e-6)
        assert calls(model[0]).served == before + served  # type: ignore[index]


@pytest.mark.parametrize(("make", "change"), CHANGES, ids=IDS)
def test_what_an_mlp_reads_from_elsewhere_may_change(make: Callable[[], MLP], change: Callable[[Any], None]) -> None:
    model, stock = fuse(make())
    duplicate = copy.deepcopy(model)
    for _ in range(3):
        assert_stock(model, stock, served=True)
    for _ in range(3):
        change(model[0])
        change(stock[0])
        assert_stock(model, stock, served=False)
    assert_stock(duplicate, fuse_free(duplicate), served=True)


def fuse_free(model: nn.Module) -> nn.Module:
    stock = copy.deepcopy(model)
    slothplug.unpatch(stock)
    return stock


@pytest.mark.parametrize(("make", "change"), CHANGES[:3] + CHANGES[-2:], ids=IDS[:3] + IDS[-2:])
def test_a_change_that_is_taken_back_is_served_again(make: Callable[[], MLP], change: Callable[[Any], None]) -> None:
    model, stock = fuse(make())
    space = model[0].config.__dict__ if model[0].config is not None else model[0].__dict__
    before = dict(space)
    change(model[0])
    for _ in range(3):
        model(torch.randn(4, 16))
    for name in space.keys() - before.keys():
        del space[name]
    space.update(before)
    for _ in range(3):
        model(torch.randn(4, 16))
    assert_stock(model, stock, served=True)


@pytest.mark.parametrize("table", [ACTIVATIONS, ACT2FN], ids=["dictionary", "ACT2FN"])
def test_an_entry_of_a_global_table_may_be_replaced(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(hidden_act="silu")
    model, stock = fuse(MLP(config) if table is ACTIVATIONS else FromACT2FN(config))
    assert_stock(model, stock, served=True)
    monkeypatch.setitem(table, "silu", torch.tanh if table is ACTIVATIONS else (nn.Tanh, {}))
    for _ in range(3):
        assert_stock(model, stock, served=False)


@pytest.mark.parametrize("name", ["chosen_in", "ACTIVATIONS"])
def test_a_global_may_be_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock = fuse(FromFunction(SimpleNamespace(hidden_act="silu")))
    assert_stock(model, stock, served=True)
    monkeypatch.setitem(globals(), name, {"silu": torch.tanh} if name == "ACTIVATIONS" else lambda _: torch.tanh)
    for _ in range(3):
        assert_stock(model, stock, served=False)


def test_a_method_or_a_function_of_torch_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Direct(MLP):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return functional.silu(x)

    for change in (
        lambda: monkeypatch.setattr(Direct, "act", lambda _, x: torch.tanh(x)),
        lambda: monkeypatch.setattr(functional, "silu", torch.tanh),
        lambda: monkeypatch.setattr(Direct, "forward", lambda self, x: self.down_proj(x.new_ones(4, 24))),
    ):
        model, stock = fuse(Direct())
        assert_stock(model, stock, served=True)
        with monkeypatch.context():
            change()
            assert_stock(model, stock, served=False)
            monkeypatch.undo()


def test_what_the_forward_does_not_read_may_change() -> None:
    model, stock = fuse(MLP(LlamaConfig()))
    model[0].config.use_cache = False
    model[0].config.rope_scaling = {"rope_type": "linear"}
    model[0].note = "later"
    assert_stock(model, stock, served=True)
    assert not calls(model[0]).fallbacks


@pytest.mark.parametrize("value", [torch.tensor(1.0), {1.0}, [nn.SiLU()]], ids=["tensor", "set", "module in a list"])
def test_what_could_not_be_compared_later_is_left_with_that_reason(value: object) -> None:
    class Scaled(MLP):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            assert self.scale is not None
            return functional.silu(x)

    mlp = Scaled()
    mlp.scale = value
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(nn.Sequential(mlp), {"ops": ["glu"]})
    assert "its forward reads scale, " in report.left[0].reason
    assert "whose changes would go unnoticed" in report.left[0].reason


class Norm(nn.Module):
    """Reads its eps from a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.rand(16) + 0.5)

    def eps(self) -> float:
        return float(self.config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps())
        return (n * self.weight.float()).to(x.dtype)


class NormOfGlobal(Norm):
    def eps(self) -> float:
        return EPS


@pytest.mark.parametrize("eps", [3e-4, 1e-6])
def test_a_norm_that_reads_its_eps_from_a_configuration_is_served_while_that_stays(eps: float) -> None:
    model, stock = fuse(Norm(LlamaConfig(rms_norm_eps=eps)))
    for _ in range(2):
        assert_stock(model, stock, served=True)
    model[0].config.rms_norm_eps = stock[0].config.rms_norm_eps = 1.0
    for _ in range(3):
        assert_stock(model, stock, served=False)


def test_a_norm_whose_eps_is_a_global_is_served_while_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock = fuse(NormOfGlobal(None))
    assert_stock(model, stock, served=True)
    monkeypatch.setitem(globals(), "EPS", 1.0)
    for _ in range(3):
        assert_stock(model, stock, served=False)


class TrainingRMSNorm(nn.RMSNorm):
    """Normalises in training, and in evaluation does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else x


def test_a_norm_is_asked_for_what_it_computes_in_training_and_in_evaluation() -> None:
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(nn.Sequential(TrainingRMSNorm(16, eps=EPS)), {"ops": ["rms_norm"], "backend": "torch"})
    assert [site.reason for site in report.left] == ["computes something else than the known RMS normalisations"]
