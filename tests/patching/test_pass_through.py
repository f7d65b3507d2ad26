"""Arguments reach a patched model's forward untouched, whatever this version of transformers and PEFT knows of them.

https://github.com/unslothai/unsloth/pull/5538, https://github.com/huggingface/trl/issues/2770,
https://github.com/axolotl-ai-cloud/axolotl/issues/2767: forwards that had been copied broke on, or dropped, arguments
that transformers or PEFT had added or renamed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import slothplug
from slothplug.patching.predicates import OTHER_ARGUMENTS
from tests.hf.tiny import llama, with_lora
from tests.patching.full_and_lora import core, lora, reasons

LENGTH, KEPT = 12, 5
IDS = 3 + (torch.arange(2 * LENGTH).view(2, LENGTH) * 7) % 60
LABELS = IDS.masked_fill(torch.arange(LENGTH) < 3, -100)
POSITIONS = torch.arange(LENGTH - KEPT, LENGTH)

MODELS: dict[str, Callable[[], nn.Module]] = {"bare": llama, "peft": lambda: with_lora(llama())}


def both(kind: str) -> tuple[nn.Module, nn.Module]:
    """A patched model and its unpatched copy, in training mode."""
    stock = MODELS[kind]().train()
    fast = copy.deepcopy(stock)
    assert slothplug.patch(fast).fused
    return fast, stock


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a model's output, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Cache):
        return [tensor for layer in value.layers for tensor in (layer.keys, layer.values)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def outcome(model: nn.Module, train: bool, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """What a call gave (its form, and every tensor and gradient), or the exception that it ended by."""
    model.train(train).zero_grad()
    try:
        with torch.set_grad_enabled(train):
            output = model(**inputs)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return (type(error), str(error)), []
    found = tensors(output)
    if train:
        sum(tensor.float().square().mean() for tensor in found if tensor.requires_grad).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    form = type(output), list(output) if isinstance(output, dict) else len(output), list(gradients)
    return form, [*found, *gradients.values()]


def assert_equal(fast: nn.Module, stock: nn.Module, train: bool, inputs: dict[str, Any]) -> None:
    got, expected = outcome(fast, train, inputs), outcome(stock, train, inputs)
    assert got[0] == expected[0]
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


WITHOUT_LABELS: dict[str, dict[str, Any]] = {
    "logits_to_keep 1": {"logits_to_keep": 1},
    "logits_to_keep, several": {"logits_to_keep": KEPT},
    "logits_to_keep by positions": {"logits_to_keep": POSITIONS},
    "output_hidden_states": {"output_hidden_states": True},
    "a tuple": {"return_dict": False},
    "a cache": {"use_cache": True},
    "an unknown argument": {"no_model_knows_this": 3},
}
WITH_LABELS: dict[str, dict[str, Any]] = {
    "logits_to_keep": {"logits_to_keep": KEPT, "labels": LABELS[:, -KEPT:]},
    "logits_to_keep by positions": {"logits_to_keep": POSITIONS, "labels": LABELS[:, -KEPT:]},
    "logits_to_keep that do not fit the labels": {"logits_to_keep": KEPT, "labels": LABELS},
    "output_hidden_states": {"output_hidden_states": True, "labels": LABELS},
    "a tuple": {"return_dict": False, "labels": LABELS},
    "the count of tokens": {"num_items_in_batch": 23, "labels": LABELS},
    "an unknown argument": {"no_model_knows_this": 3, "labels": LABELS},
}
CALLS = [
    pytest.param(train, inputs, id=f"{'train' if train else 'eval'}, {name}{', labels' if 'labels' in inputs else ''}")
    for train in (False, True)
    for name, inputs in [*WITHOUT_LABELS.items(), *WITH_LABELS.items()]
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("train", "inputs"), CALLS)
def test_a_call_gives_what_it_gives_unpatched(kind: str, train: bool, inputs: dict[str, Any]) -> None:
    fast, stock = both(kind)
    assert_equal(fast, stock, train, {"input_ids": IDS, "use_cache": False, **inputs})


@pytest.mark.parametrize("kind", MODELS)
def test_under_ddp(kind: str, process_group: None) -> None:
    fast, stock = (DistributedDataParallel(model) for model in both(kind))
    for inputs in (WITH_LABELS["logits_to_keep"], WITH_LABELS["output_hidden_states"]):
        assert_equal(fast, stock, True, {"input_ids": IDS, "use_cache": False, **inputs})


def test_logits_to_keep_beside_labels_is_served_by_the_fused_loss() -> None:
    model = llama()
    report = slothplug.patch(model)
    model(IDS, use_cache=False, **WITH_LABELS["logits_to_keep"]).loss.backward()
    assert [site.calls.served for site in report.fused if site.op == "head"] == [1]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_unknown_argument_reaches_the_attention_function(
    kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, heard = object(), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def recording(*args: Any, **kwargs: Any) -> Any:
        heard.append(kwargs.pop("no_model_knows_this", None))
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", recording)
    counts = []
    for model in both(kind):
        heard.clear()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(IDS, labels=LABELS, use_cache=False, no_model_knows_this=marker).loss.backward()
        assert heard
        assert all(one is marker for one in heard)
        counts.append(len(heard))
    assert counts[0] == counts[1]


def test_modules_called_by_keyword() -> None:
    """The names of a stock forward's arguments are part of how it may be called."""
    model = lora()
    report = slothplug.patch(model)
    layer, x = core(model).model.layers[0], torch.randn(2, 3, 32)
    head = core(model).lm_head
    calls = [
        (layer.input_layernorm, {"hidden_states": x}),
        (layer.mlp, {"x": x}),
        (layer.self_attn.q_proj, {"x": x}),
        (head, {"x": x} if hasattr(head, "base_layer") else {"input": x}),
    ]
    for module, arguments in calls:
        torch.testing.assert_close(module(**arguments), module(x))
    assert OTHER_ARGUMENTS.reason in reasons(report)
