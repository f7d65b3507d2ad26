"""Reentrant checkpointing is run as the other kind, with stock's numbers, and given back by undo."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import slothplug
from slothplug.checkpointing.one_pass import OnePass, in_one_pass, why_not_cut_short
from tests.patching.device import cpu_only
from tests.patching.lora_models import IDS, assert_equal, model, step
from tests.patching.test_recomputed_products import Products

FUNCTION = "_gradient_checkpointing_func"
TAKEN = "the recompute ends with the last tensor that the backward reads"


def checkpointed(one: PeftModel, **options: Any) -> PeftModel:
    one.enable_input_require_grads()
    one.gradient_checkpointing_enable({"use_reentrant": True, **options})
    return one


def functions(one: nn.Module) -> list[Any]:
    return [module.__dict__[FUNCTION] for module in one.modules() if FUNCTION in module.__dict__]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_without_checkpointing(dropout: float, when: str) -> None:
    plain = model(lora_dropout=dropout)
    stock, fast = checkpointed(copy.deepcopy(plain)), copy.deepcopy(plain)
    slothplug.patch(plain)
    if when == "before":
        checkpointed(fast)
    report = slothplug.patch(fast)
    if when == "after":
        checkpointed(fast)
    for _ in range(2):
        torch.manual_seed(0)
        expected = step(plain)
        torch.manual_seed(0)
        ours = step(fast)
        torch.manual_seed(0)
        assert_equal(step(stock), ours)
        assert torch.equal(ours[0], expected[0])
        assert all(torch.equal(gradient, expected[1][name]) for name, gradient in ours[1].items())
    assert all(type(function) is OnePass for function in functions(fast))
    assert TAKEN in str(report)


@cpu_only
def test_products_that_nobody_reads_are_not_made_again() -> None:
    fast = checkpointed(model())
    slothplug.patch(fast)
    step(fast)
    loss = fast(input_ids=IDS, labels=IDS).loss
    with Products(fast) as products:
        loss.backward()
    assert products.found["down_proj"] == 0
    assert products.found["up_proj"] == fast.config.num_hidden_layers


def test_undo_gives_the_function_back() -> None:
    fast = checkpointed(model())
    given = functions(fast)
    report = slothplug.patch(fast)
    step(fast)
    assert functions(fast) != given
    report.undo()
    assert all(a is b for a, b in zip(functions(fast), given, strict=True))


def test_a_function_that_is_set_again_is_taken_again_and_given_back() -> None:
    fast = checkpointed(model())
    report = slothplug.patch(fast)
    step(fast)
    checkpointed(fast)
    given = functions(fast)
    assert not any(type(function) is OnePass for function in given)
    step(fast)
    assert all(type(function) is OnePass for function in functions(fast))
    report.undo()
    assert all(a is b for a, b in zip(functions(fast), given, strict=True))


def test_off() -> None:
    fast = checkpointed(model())
    given = functions(fast)
    report = slothplug.patch(fast, {"checkpointing": "off"})
    step(fast)
    assert functions(fast) == given
    assert "checkpointing" not in str(report)


def test_copies_and_pickles() -> None:
    fast = checkpointed(model())
    slothplug.patch(fast)
    expected = step(fast)
    assert_equal(step(copy.deepcopy(fast)), expected)
    layer = fast.base_model.model.model.layers[0]
    assert type(pickle.loads(pickle.dumps(layer)).__dict__[FUNCTION]) is partial


def test_under_hooks_on_saved_tensors_the_given_function_is_called() -> None:
    fast = checkpointed(model())
    expected = step(fast)
    slothplug.patch(fast)
    step(fast)
    called = []
    for function in functions(fast):
        function.given = lambda *args, given=function.given: called.append(given) or given(*args)
    with save_on_cpu():
        loss = fast(input_ids=IDS, labels=IDS).loss
    fast.zero_grad()
    loss.backward()
    assert len(called) == fast.config.num_hidden_layers
    assert torch.allclose(loss, expected[0])


def test_where_torchs_class_is_replaced_the_given_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Axolotl does for ``activation_offloading: hidden_states``, before or after the function was taken over."""

    class Theirs(torch.utils.checkpoint.CheckpointFunction):
        calls = 0

        @staticmethod
        def forward(*args: Any) -> Any:
            Theirs.calls += 1
            return torch.utils.checkpoint.CheckpointFunction.__mro__[1].forward(*args)

    fast = checkpointed(model())
    expected = step(fast)
    slothplug.patch(fast)
    step(fast)
    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", Theirs)
    assert_equal(step(fast), expected)
    assert Theirs.calls == fast.config.num_hidden_layers


@pytest.mark.parametrize(
    "function",
    [
        partial(checkpoint, use_reentrant=False),
        partial(checkpoint),
        partial(checkpoint, use_reentrant=True, context_fn=lambda: None),
        partial(lambda *args: args, use_reentrant=True),
        checkpoint,
        lambda function, *args: function(*args),
    ],
)
def test_other_functions_stay(function: Any) -> None:
    assert in_one_pass(function) is None


def test_layers_whose_hooks_must_run_to_the_end_are_left() -> None:
    fast = checkpointed(model())
    fast.base_model.model.model.layers[1].mlp._hf_hook = object()
    report = slothplug.patch(fast)
    for _ in range(2):
        step(fast)
    kinds = [type(layer.__dict__.get(FUNCTION)) for layer in fast.base_model.model.model.layers]
    assert kinds in ([OnePass, partial], [type(None)] * 2)  # releases in which the model has the function
    assert "accelerate moves the weights of layers.1.mlp" in str(report)
    weight = fast.base_model.model.model.layers[0].mlp.gate_proj.base_layer.weight
    weight.ds_id = 3
    assert "sharded" in why_not_cut_short(fast.base_model.model.model.layers[0]).reason
