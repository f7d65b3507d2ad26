"""What a LoRA layer's calls take for granted within an outermost call: every change is noticed by the next one."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from slothplug.ops.lora.facts import LoraFacts
from slothplug.patching.forward_context import facts_of
from slothplug.patching.served import STATE
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, Outcome, assert_equal, fallbacks, layer, logits, model, pair, patch, step

Q = "layers.1.self_attn.q_proj"


def q_of(model: nn.Module) -> nn.Module:
    return layer(model, Q)


def count(module: nn.Module, *_: object) -> None:
    module.__dict__["seen"] = module.__dict__.get("seen", 0) + 1


def add_adapter(model: PeftModel, name: str = "other") -> None:
    torch.manual_seed(1)
    model.add_adapter(name, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def switch(model: PeftModel) -> None:
    add_adapter(model)
    model.set_adapter("other")


def another_in_the_callers_list(model: PeftModel) -> None:
    """PEFT's layers hold the list that the caller passed."""
    add_adapter(model)
    names = ["default"]
    model.base_model.set_adapter(names)
    model(input_ids=IDS)
    names[0] = "other"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".other." in name)


def delete_the_active(model: PeftModel) -> None:
    add_adapter(model)
    model.delete_adapter("default")


def merge_and_unmerge(model: PeftModel) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def scale(model: PeftModel) -> None:
    q_of(model).set_scale("default", 3.0)


def scale_layers(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(3.0)


def other_scalings(model: PeftModel) -> None:
    q_of(model).scaling = {"default": 5.0}


def freeze(model: PeftModel) -> None:
    q_of(model).lora_A["default"].weight.requires_grad_(False)


def thaw(model: PeftModel) -> None:
    q_of(model).base_layer.weight.requires_grad_(True)


def other_dtype(model: PeftModel) -> None:
    q_of(model).to(torch.float64).to(torch.float32)


def adapters_in_bfloat16(model: PeftModel) -> None:
    q_of(model).lora_A.to(torch.bfloat16)
    q_of(model).lora_B.to(torch.bfloat16)


def data(model: PeftModel) -> None:
    weight = q_of(model).lora_B["default"].weight
    weight.data = weight.data * 2


def rank_by_data(model: PeftModel) -> None:
    a, b = q_of(model).lora_A["default"].weight, q_of(model).lora_B["default"].weight
    a.data, b.data = a.data[:2], b.data[:, :2]


def base_data(model: PeftModel) -> None:
    weight = q_of(model).base_layer.weight
    weight.data = weight.data * 2


def parameter(model: PeftModel) -> None:
    second = q_of(model).lora_B["default"]
    second.weight = nn.Parameter(second.weight.detach() * 2)


def module_a(model: PeftModel) -> None:
    torch.manual_seed(2)
    q_of(model).lora_A["default"] = nn.Linear(32, 4, bias=False)


def module_dict(model: PeftModel) -> None:
    torch.manual_seed(2)
    q_of(model).lora_B = nn.ModuleDict({"default": nn.Linear(4, 32, bias=False)})


def base_bias(model: PeftModel) -> None:
    q_of(model).base_layer.bias = nn.Parameter(torch.full((32,), 0.5))


def dropout_probability(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9


def dropout_module(model: PeftModel) -> None:
    q_of(model).lora_dropout["default"] = nn.Dropout(0.7)


def no_cast(model: PeftModel) -> None:
    q_of(model).cast_input_dtype_enabled = False


def evaluate(model: PeftModel) -> None:
    model.eval()


def hooks(part: str) -> Callable[[PeftModel], None]:
    def add(model: PeftModel) -> None:
        q_of(model).get_submodule(part).register_forward_hook(count)

    add.__name__ = f"hook on {part or 'itself'}"
    return add


def backward_hook(model: PeftModel) -> None:
    q_of(model).lora_A["default"].register_full_backward_hook(count)


def own_forward(model: PeftModel) -> None:
    base = q_of(model).base_layer
    base.forward = lambda x: nn.functional.linear(x, base.weight) * 2


def other_class(model: PeftModel) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    q_of(model).lora_A["default"].__class__ = Doubled


CHANGES = [
    another_in_the_callers_list,
    switch, delete_the_active, merge_and_unmerge, scale, scale_layers, other_scalings, freeze, thaw, other_dtype,
    adapters_in_bfloat16, data, rank_by_data, base_data, parameter, module_a, module_dict, base_bias,
    dropout_probability, dropout_module, no_cast, evaluate, backward_hook, own_forward, other_class,
    *(hooks(part) for part in ("", "base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default")),
]  # fmt: skip


def bound(model: nn.Module) -> Iterator[bool]:
    """For each served layer, whether the last outermost call of the model had facts of it."""
    binding = model.__dict__[STATE].guard._binding
    assert binding is not None
    for module in model.modules():
        served = module.__dict__.get(STATE)
        if served is not None and getattr(served, "op", None) == "lora":
            yield type(binding.facts.get(served)) is LoraFacts


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_calls_is_noticed(change: Callable[[PeftModel], None]) -> None:
    fast, stock, _ = pair(lora_dropout=0.3)
    assert_equal(step(fast), step(stock))
    assert all(bound(fast))
    for one in (fast, stock):
        change(one)
    for seed in range(3):  # the model is bound anew, then the new facts hold
        assert_equal(*outcomes(fast, stock, seed), 1e-2 if change is adapters_in_bfloat16 else 2e-5)
    assert hook_calls(fast) == hook_calls(stock)


def hook_calls(model: nn.Module) -> dict[str, int]:
    return {name: module.__dict__["seen"] for name, module in model.named_modules() if "seen" in module.__dict__}


def outcomes(fast: nn.Module, stock: nn.Module, seed: int) -> tuple[Outcome, Outcome]:
    return step(fast, seed), step(stock, seed)


def test_a_merge_between_two_calls_is_noticed() -> None:
    fast, stock, _ = pair()
    step(fast)
    for one in (fast, stock):
        one.merge_adapter()
    for _ in range(3):
        assert torch.equal(logits(fast), logits(stock))
    for one in (fast, stock):
        one.unmerge_adapter()
    assert_equal(step(fast), step(stock))


def test_facts_are_bound_again_for_a_state_that_lasts() -> None:
    fast = model()
    stock, report = copy.deepcopy(fast), patch(fast, graphs="off")
    step(fast)
    for one in (fast, stock):
        scale(one)
    for _ in range(3):
        assert_equal(step(fast), step(stock))
    seen = []
    served = q_of(fast).__dict__[STATE]
    kernel = served.kernel
    served.kernel = lambda *args, **options: (seen.append(type(facts_of(served))), kernel(*args, **options))[1]
    step(fast)
    assert seen == [LoraFacts]
    assert not fallbacks(report)


def test_a_model_that_is_first_called_with_disabled_adapters_is_bound_nevertheless() -> None:
    fast, stock, _ = pair()
    with fast.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(fast(input_ids=IDS).logits, stock(input_ids=IDS).logits, rtol=0, atol=0)
    assert all(bound(fast))
    assert_equal(step(fast), step(stock))


class Midway(nn.Module):
    """A part of a model whose forward changes the model's state around an inner part."""

    def __init__(self, inner: nn.Module, around: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, *args: object, **kwargs: object) -> object:
        with self.around():
            return self.inner(*args, **kwargs)

    forward.__module__ = "transformers.for_a_test"  # around code of the user's own nothing is bound


@contextlib.contextmanager
def merged(model: PeftModel) -> Iterator[None]:
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextlib.contextmanager
def other_active(model: PeftModel) -> Iterator[None]:
    model.base_model.set_adapter("other")
    yield
    model.base_model.set_adapter("default")


@contextlib.contextmanager
def without_dropout(model: PeftModel) -> Iterator[None]:
    model.eval()
    yield
    model.train()


AROUND: dict[str, Callable[[PeftModel], contextlib.AbstractContextManager[object]]] = {
    "adapters disabled": lambda model: model.disable_adapter(),
    "merged": merged,
    "another adapter": other_active,
    "evaluation": without_dropout,
    "autocast": lambda model: torch.autocast(DEVICE, torch.bfloat16),
    "no autocast": lambda model: torch.autocast(DEVICE, enabled=False),
    "no gradients": lambda model: torch.no_grad(),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_state_that_the_models_own_forward_enters_is_noticed(
    around: Callable[[PeftModel], contextlib.AbstractContextManager[object]],
) -> None:
    fast, stock, _ = pair(lora_dropout=0.3)
    for one in (fast, stock):
        add_adapter(one)
        one.set_adapter("default")
        mlp = layer(one, "layers.1").mlp
        layer(one, "layers.1").mlp = Midway(mlp, lambda one=one: around(one))
    tolerance = 5e-2 if around is AROUND["autocast"] else 2e-5
    for seed in range(3):
        assert_equal(*outcomes(fast, stock, seed), tolerance)
        assert all(bound(fast))


def test_a_deep_copy_and_an_unloaded_model_are_bound_for_themselves() -> None:
    fast, stock, _ = pair()
    step(fast)
    duplicate, stock_duplicate = copy.deepcopy(fast), copy.deepcopy(stock)
    for one in (duplicate, stock_duplicate):
        data(one)
    assert_equal(step(duplicate), step(stock_duplicate))
    assert_equal(step(fast), step(stock))
    plain, stock_plain = fast.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(plain(input_ids=IDS).logits, stock_plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)


def test_a_patched_model_is_freed_with_its_facts() -> None:
    gc.collect()
    gc.disable()
    try:
        fast, _, report = pair()
        step(fast)
        assert all(bound(fast))
        gone = weakref.ref(q_of(fast).lora_A["default"].weight)
        del fast, report
        assert gone() is None
    finally:
        gc.enable()
