"""Checkpointed layers are replayed, and recomputed by replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.utils.checkpoint import checkpoint

import slothplug
from slothplug.graphs.captured import Purpose
from slothplug.patching.report import Report
from tests.graphs.steps import OTHER, assert_same, generator, replays, state_of, step, train, twins
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, LAYERS, layer, model


def checkpointed(reentrant: bool, **config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """As ``twins``, with checkpointing."""
    graphed, eager, report = twins(**config)
    for one in (graphed, eager):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return graphed, eager, report


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_steps_are_equal_to_the_bit(reentrant: bool, dropout: float, autocast: bool) -> None:
    graphed, eager, report = checkpointed(reentrant, lora_dropout=dropout)
    train(graphed, eager, 5, autocast=autocast)
    assert replays(graphed) == 3 * 2 * LAYERS
    # In the two eager steps torch ends a recompute that is not reentrant before down_proj.
    calls = {site.calls.served for site in report.fused if site.op == "lora"}
    assert calls == ({5 * 2} if reentrant else {5 * 2, 5 * 2 - 2})
    assert f"graphs: {LAYERS} layers recorded for 1 shape," in str(report)


def test_a_reentrant_checkpoint_that_is_taken_over_is_recorded_as_the_other_kind() -> None:
    eager = model(lora_dropout=0.2).to(DEVICE)
    eager.enable_input_require_grads()
    eager.gradient_checkpointing_enable({"use_reentrant": True})
    graphed = copy.deepcopy(eager)
    slothplug.patch(eager, {"graphs": "off"})
    slothplug.patch(graphed, {"graphs": "auto", "graph_padding": False})
    train(graphed, eager, 5)
    assert replays(graphed) == 3 * 2 * LAYERS
    (session,) = state_of(graphed).sessions.values()
    assert {purpose for _, _, purpose in session.captured} == {Purpose.FIRST_PASS, Purpose.RECOMPUTE}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_micro_batches(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for _ in range(4):
        for ids, zero in ((IDS, True), (OTHER, False), (IDS.flip(0), False)):
            assert_same(step(graphed, ids, zero), step(eager, ids, zero))
    assert replays(graphed) > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_checkpointed_calls_before_one_backward(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for other in (IDS.flip(0), OTHER):
        for _ in range(4):
            outcomes = []
            for one in (graphed, eager):
                one.zero_grad()
                torch.manual_seed(3)
                loss = one(input_ids=IDS, labels=IDS).loss - 0.3 * one(input_ids=other, labels=other).loss
                loss.backward()
                grads = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
                outcomes.append((loss.detach(), grads, generator()))
            assert_same(*outcomes)
    assert replays(graphed) > 0


def test_a_checkpointed_call_whose_recordings_are_gone_when_its_backward_comes() -> None:
    graphed, eager, _ = checkpointed(False, lora_dropout=0.2)
    train(graphed, eager, 4)
    outcomes = []
    for one in (graphed, eager):
        one.zero_grad()
        torch.manual_seed(3)
        loss = one(input_ids=IDS, labels=IDS).loss
        one.train()
        state_of(graphed).sessions.clear()
        state_of(graphed)._latest = None
        after = generator()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
        outcomes.append((loss.detach(), grads, after))
    assert_same(*outcomes)


def test_a_checkpointed_model_that_changes_before_its_backward() -> None:
    graphed, eager, _ = checkpointed(False)
    train(graphed, eager, 4)
    for one in (graphed, eager):
        one.zero_grad()
        loss = one(input_ids=IDS, labels=IDS).loss
        layer(one, "layers.0.self_attn").attention_dropout = 0.0  # a new value, and the same number
        loss.backward()
    grads = [{n: p.grad for n, p in one.named_parameters() if p.grad is not None} for one in (graphed, eager)]
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_of_which_some_are_checkpointed(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for one in (graphed, eager):
        layer(one, "layers.1").gradient_checkpointing = False
    train(graphed, eager, 5)
    for one in (graphed, eager):
        layer(one, "layers.0").gradient_checkpointing = False
        layer(one, "layers.1").gradient_checkpointing = True
    train(graphed, eager, 5)
    assert replays(graphed) > 0


def test_another_checkpointing_function_is_called() -> None:
    graphed, eager, _ = checkpointed(False)
    called = []

    def custom(function: Callable[..., Any], *args: Any) -> Any:
        called.append(function)
        return checkpoint(function, *args, use_reentrant=False)

    for one in (graphed, eager):
        for part in one.modules():
            if "_gradient_checkpointing_func" in part.__dict__:
                part._gradient_checkpointing_func = custom
    train(graphed, eager, 4)
    assert len(called) == 4 * LAYERS * 2
