"""Walks over a patched model's modules give what they give of an unpatched one, whatever was changed since the last."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from tests.patching.lora_models import model as lora_model

Change = Callable[[nn.Module], object]


def layers(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.base_model.model.model.layers
    return found


def rename(model: Any) -> None:
    layer = layers(model)[0]
    layer._modules["renamed"] = layer._modules.pop("mlp")


CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "a layer less": lambda model: layers(model).pop(1),
    "a layer more": lambda model: layers(model).append(copy.deepcopy(layers(model)[0])),
    "replaced": lambda model: setattr(layers(model)[1].self_attn, "q_proj", nn.Linear(4, 4)),
    "replaced in the model": lambda model: setattr(model.base_model.model, "lm_head", nn.Linear(4, 4)),
    "added to the model": lambda model: model.add_module("more", nn.Linear(4, 4)),
    "shared": lambda model: setattr(layers(model)[1], "mlp", layers(model)[0].mlp),
    "removed": lambda model: delattr(layers(model)[0], "input_layernorm"),
    "renamed": rename,
    "a parameter": lambda model: layers(model)[0].register_parameter("extra", nn.Parameter(torch.ones(2))),
    "another adapter": lambda model: model.add_adapter("second", copy.deepcopy(model.peft_config["default"])),
}


def seen(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": list(model.named_modules()),
        "below": list(model.named_modules(prefix="below")),
        "duplicates": list(model.named_modules(remove_duplicate=False)),
        "parameters": list(model.named_parameters()),
        "buffers": list(model.named_buffers()),
        "state": list(model.state_dict()),
        "number": sum(parameter.numel() for parameter in model.parameters()),
    }


def as_stock(model: Any) -> dict[str, Any]:
    """What the classes that the model and its wrappers have without the patch would say."""
    patched = [model, model.base_model, model.base_model.model]
    kinds = [type(one) for one in patched]
    for one, kind in zip(patched, kinds, strict=True):
        one.__class__ = kind.__mro__[1]
    found = seen(model)
    for one, kind in zip(patched, kinds, strict=True):
        one.__class__ = kind
    return found


def same(ours: dict[str, Any], stock: dict[str, Any]) -> bool:
    return (
        ours.keys() == stock.keys()
        and all(
            len(ours[name]) == len(stock[name])
            and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(ours[name], stock[name], strict=True))
            for name in ("modules", "below", "duplicates", "parameters", "buffers")
        )
        and (ours["state"], ours["number"]) == (stock["state"], stock["number"])
    )


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_walk_finds(change: str) -> None:
    model = lora_model()
    slothplug.patch(model)
    assert "named_modules" in type(model).__dict__
    for part in (model, model.base_model.model):
        assert list(part.named_modules()) == list(type(part).__mro__[1].named_modules(part))
    CHANGES[change](model)
    assert same(seen(model), as_stock(model))
    assert same(seen(model), as_stock(model))


class Hides(nn.Module):
    """Shows less than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield prefix, self


def test_a_module_that_hides_its_children() -> None:
    model = lora_model()
    slothplug.patch(model)
    layers(model)[0].hides = Hides()
    assert same(seen(model), as_stock(model))
    model.train(False)
    assert not layers(model)[0].hides.inner.training


class Counts(nn.Module):
    """Has a ``train`` of its own, as frozen normalisation has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train(self, mode: bool = True) -> Counts:
        self.calls += 1
        return super().train(False)


def test_modes() -> None:
    model = lora_model()
    slothplug.patch(model)
    inside = layers(model)[1].mlp
    for mode in (True, True, False, False, True):
        assert model.train(mode) is model
        assert {module.training for module in model.modules()} == {mode}
        inside.training = not mode  # by itself, as PEFT and users do
        model.train(mode)
        assert inside.training is mode
    model.eval()
    assert not any(module.training for module in model.modules())
    layers(model)[0].counts = counts = Counts()
    for calls in (1, 2, 3):
        model.train()
        assert (counts.calls, counts.training) == (calls, False)


def test_a_train_that_is_replaced_is_called() -> None:
    model = lora_model()
    slothplug.patch(model)
    model.train()
    called = []
    layers(model)[0].mlp.train = lambda mode=True: called.append(mode)
    model.train()
    assert called == [True]


def test_copies_walk_their_own_modules() -> None:
    model = lora_model()
    slothplug.patch(model)
    list(model.modules())
    duplicate = copy.deepcopy(model)
    assert not set(duplicate.modules()) & set(model.modules())
    assert [name for name, _ in duplicate.named_modules()] == [name for name, _ in model.named_modules()]


def test_nothing_keeps_a_model_alive() -> None:
    model = lora_model()
    slothplug.patch(model)
    model.train()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_undo() -> None:
    model = lora_model()
    report = slothplug.patch(model)
    before = list(model.named_modules())
    report.undo()
    assert "named_modules" not in type(model).__dict__
    assert list(model.named_modules()) == before


def test_a_module_that_was_replaced_is_not_kept_alive() -> None:
    model = lora_model()
    slothplug.patch(model, {"ops": []})
    list(model.modules())
    gone = weakref.ref(layers(model)[0].mlp.act_fn)
    layers(model)[0].mlp.act_fn = nn.SiLU()
    gc.collect()
    assert gone() is None


def test_a_walk_inside_of_what_is_compiled() -> None:
    """transformers' ``dtype`` and ``device`` walk over the parameters."""
    model = lora_model()
    slothplug.patch(model)
    list(model.modules())

    @torch.compile(backend="eager", fullgraph=True)
    def count(x: torch.Tensor) -> torch.Tensor:
        return x * len([name for name, _ in model.named_parameters()])

    assert count(torch.ones(1)).item() == len(list(model.named_parameters()))
