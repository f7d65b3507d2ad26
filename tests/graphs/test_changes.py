"""A change between two calls is noticed, and the answer is stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from tests.graphs.steps import assert_same, q, replays, step, train, twins
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, layer


def add(one: PeftModel) -> None:
    torch.manual_seed(1)
    one.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    one.to(DEVICE)
    one.set_adapter("other")


def new_weight(one: nn.Module) -> None:
    q(one).base_layer.weight.data = q(one).base_layer.weight.data * 2


def new_stock_weight(one: nn.Module) -> None:
    norm = layer(one, "layers.1.input_layernorm")
    norm.weight = nn.Parameter(norm.weight.detach() * 2)


def twice(one: nn.Module) -> None:
    q(one).register_forward_hook(lambda module, args, output: output * 2)


def twice_in_backward(one: nn.Module) -> None:
    q(one).lora_B["default"].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2,))


def scale(one: nn.Module) -> None:
    q(one).scaling["default"] = 3.0


def freeze(one: nn.Module) -> None:
    q(one).lora_A["default"].weight.requires_grad_(False)


def thaw(one: nn.Module) -> None:
    layer(one, "layers.1.input_layernorm").weight.requires_grad_(True)


def double_precision_norm(one: nn.Module) -> None:
    layer(one, "layers.0.input_layernorm").to(torch.bfloat16)


def other_attention_scaling(one: nn.Module) -> None:
    layer(one, "layers.1.self_attn").scaling = 0.9


CHANGES: dict[str, Callable[[Any], object]] = {
    "set_adapter": add,
    "scaling": scale,
    "weight data": new_weight,
    "norm weight": new_stock_weight,
    "forward hook": twice,
    "backward hook": twice_in_backward,
    "frozen": freeze,
    "trained": thaw,
    "eval": lambda one: one.eval(),
    "dtype of a norm": double_precision_norm,
    "attribute": other_attention_scaling,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_is_noticed(name: str) -> None:
    graphed, eager, _ = twins(lora_dropout=0.2)
    train(graphed, eager, 4)
    for one in (graphed, eager):
        CHANGES[name](one)
    before = replays(graphed)
    assert_same(step(graphed), step(eager))
    assert replays(graphed) == before
    train(graphed, eager, 4)


def test_adapters_that_are_disabled_for_a_call() -> None:
    graphed, eager, _ = twins()
    for _ in range(4):
        train(graphed, eager, 1)
        logits = []
        for one in (graphed, eager):
            with one.disable_adapter(), torch.no_grad():
                logits.append(one(input_ids=IDS).logits.clone())
        assert torch.equal(*logits)


def test_adapters_that_are_merged_for_an_evaluation() -> None:
    graphed, eager, _ = twins()
    for _ in range(4):
        train(graphed, eager, 1)
        for change in ("merge_adapter", "unmerge_adapter"):
            logits = []
            for one in (graphed, eager):
                getattr(one, change)()
                with torch.no_grad():
                    logits.append(one(input_ids=IDS).logits.clone())
            assert torch.equal(*logits)
