"""Whatever somebody does with the class of a patched module, what comes out of it is stock."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import slothplug
from slothplug.patching.private_class import LEDGER, give_back, is_patched, replace_attribute
from slothplug.patching.served import STATE

IDS = torch.arange(48).view(2, 24)


@pytest.fixture
def model(tiny_llama: Callable[..., nn.Module]) -> nn.Module:
    model = tiny_llama()
    slothplug.patch(model)
    return model


def bare(module: nn.Module) -> nn.Module:
    """An instance of the module's class that was never initialised, with the module's attributes and not its state."""
    double = type(module).__new__(type(module))
    double.__dict__.update({key: value for key, value in module.__dict__.items() if key != "_slothplug"})
    return double


class TestNewInstances:
    def test_of_a_model(self, model: nn.Module) -> None:
        new = type(model)(model.config)
        assert type(new) is LlamaForCausalLM
        assert not any(is_patched(module) for module in new.modules())
        assert torch.isfinite(new(input_ids=IDS, labels=IDS).loss)

    def test_of_a_part(self, model: nn.Module) -> None:
        mlp, norm = model.model.layers[0].mlp, model.model.norm
        assert type(type(mlp)(model.config)) is LlamaMLP
        assert type(type(norm)(32, eps=1e-5)) is LlamaRMSNorm

    def test_from_files(self, model: nn.Module, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        new = type(model).from_pretrained(tmp_path)
        assert type(new) is LlamaForCausalLM
        torch.testing.assert_close(new.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_without_initialisation(self, model: nn.Module) -> None:
        norm = model.model.norm
        x = torch.randn(2, 32)
        assert torch.equal(bare(norm)(x), LlamaRMSNorm.forward(norm, x))

    def test_of_a_subclass(self, model: nn.Module) -> None:
        doubled = type(
            "Doubled", (type(model.model.norm),), {"forward": lambda self, x: 2 * super(doubled, self).forward(x)}
        )
        norm = doubled(32)
        x = torch.randn(2, 32)
        assert isinstance(norm, doubled)
        assert torch.equal(norm(x), 2 * LlamaRMSNorm(32)(x))

    def test_by_an_assigned_class(self, model: nn.Module) -> None:
        norm = LlamaRMSNorm(32)
        norm.__class__ = type(model.model.norm)
        x = torch.randn(2, 32)
        assert torch.equal(norm(x), LlamaRMSNorm(32)(x))
        assert not is_patched(norm)
        slothplug.unpatch(norm)
        assert type(norm) is LlamaRMSNorm

    def test_a_new_layer_beside_patched_ones_is_served_by_the_next_patch(self, model: nn.Module) -> None:
        layers = model.model.layers
        layers.append(copy.deepcopy(layers[0]))
        layers[-1].mlp = type(layers[0].mlp)(model.config)
        report = slothplug.patch(model)
        assert is_patched(layers[-1].mlp)
        assert len(report.by_op()["glu"]) == 3


def test_a_shallow_copy_runs_with_the_same_weights(model: nn.Module) -> None:
    norm = model.model.norm
    duplicate = copy.copy(norm)
    x = torch.randn(2, 32)
    assert duplicate.weight is norm.weight
    assert torch.equal(duplicate(x), norm(x))


def test_source_and_signature_are_the_stock_classes(model: nn.Module) -> None:
    norm = model.model.norm
    assert inspect.getsource(type(norm)) == inspect.getsource(LlamaRMSNorm)
    assert inspect.getsource(norm.forward) == inspect.getsource(LlamaRMSNorm.forward)
    assert inspect.signature(type(norm)).parameters == inspect.signature(LlamaRMSNorm).parameters
    assert inspect.signature(norm) == inspect.signature(LlamaRMSNorm(32))


def test_a_package_holds_the_stock_class(model: nn.Module) -> None:
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern(["torch.**", "transformers.**"])
        exporter.save_pickle("norm", "norm.pkl", model.model.norm)
    file.seek(0)
    loaded = torch.package.PackageImporter(file).load_pickle("norm", "norm.pkl")
    assert type(loaded) is LlamaRMSNorm


class TestReplacedAttributes:
    def test_are_restored_by_undo(self, model: nn.Module) -> None:
        layer = model.model.layers[0]
        before = {name: value for name, value in layer.__dict__.items() if name != STATE}
        replace_attribute(layer, "gradient_checkpointing", "ours")
        replace_attribute(layer, "gradient_checkpointing", "ours again")
        replace_attribute(layer, "new", 1)
        assert (layer.gradient_checkpointing, layer.new) == ("ours again", 1)
        slothplug.unpatch(model)
        assert layer.__dict__ == before
        assert type(layer).__name__ == "LlamaDecoderLayer"
        assert LEDGER not in layer.__dict__

    def test_that_somebody_has_set_since_stay(self, model: nn.Module) -> None:
        layer = model.model.layers[0]
        replace_attribute(layer, "gradient_checkpointing", "ours")
        layer.gradient_checkpointing = "theirs"
        slothplug.unpatch(model)
        assert layer.gradient_checkpointing == "theirs"

    def test_are_stock_in_pickles_and_ours_in_copies(self, model: nn.Module) -> None:
        norm = model.model.norm
        replace_attribute(norm, "variance_epsilon", 1.0)
        loaded = pickle.loads(pickle.dumps(norm))
        assert (type(loaded), loaded.variance_epsilon) == (LlamaRMSNorm, 1e-6)
        assert LEDGER not in loaded.__dict__
        duplicate = copy.deepcopy(norm)
        assert duplicate.variance_epsilon == 1.0
        give_back(duplicate)
        assert (type(duplicate), duplicate.variance_epsilon, norm.variance_epsilon) == (LlamaRMSNorm, 1e-6, 1.0)


def test_a_call_of_the_model_is_what_its_class_has_now(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    slothplug.patch(model)
    stock = type(model).__mro__[1]
    monkeypatch.setattr(stock, "__call__", lambda self, *args, **kwargs: "theirs")
    assert model() == "theirs"


class Registered(nn.Module):
    """Subclasses have to say who they are."""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()


class RegisteredNorm(Registered, kind="norm"):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class RegisteredModel(Registered, kind="model"):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_a_part_whose_class_cannot_be_subclassed_is_left() -> None:
    report = slothplug.patch(nn.Sequential(RegisteredNorm(), nn.RMSNorm(16, eps=1e-6)), {"ops": ["rms_norm"]})
    assert [site.name for site in report.fused] == ["1"]
    (left,) = report.left
    assert left.reason.startswith("its class cannot be subclassed: TypeError: ")


def test_a_model_whose_class_cannot_be_subclassed_is_refused_and_stays_as_it_was() -> None:
    model = RegisteredModel()
    with pytest.raises(slothplug.UnsupportedModelError, match="RegisteredModel, its class cannot be subclassed"):
        slothplug.patch(model, {"ops": ["rms_norm"]})
    assert type(model.norm) is nn.RMSNorm
    assert not is_patched(model.norm)
