"""A model that accelerate dispatched (``device_map``): its hooks call the stock forward, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from tests.patching.device import DEVICE
from tests.patching.full_and_lora import assert_same, full, lora, step

accelerate = pytest.importorskip("accelerate")


def moved(model: nn.Module) -> Any:
    return accelerate.dispatch_model(model, {"": DEVICE}, main_device=DEVICE, force_hooks=True)


@pytest.mark.filterwarnings("ignore::slothplug.NothingFusedWarning")
@pytest.mark.parametrize("make", [full, lora])
def test_a_dispatched_model_is_left_with_the_true_reason(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    stock = make()
    torch.manual_seed(0)
    model = moved(make())
    report = slothplug.patch(model)
    assert not report.fused
    assert {site.op for site in report.left} >= {"rms_norm", "glu", "rotary", "head"}
    for site in report.left:
        assert "AlignDevicesHook calls its stock forward" in site.reason
        assert "without device_map" in site.reason
    assert_same(step(model), step(stock))


def test_offloaded_weights_are_named(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama(num_hidden_layers=1)
    accelerate.cpu_offload(model.model.norm, execution_device=torch.device(DEVICE))
    report = slothplug.patch(model)
    (left,) = report.left
    assert left.name == "model.norm"
    assert "accelerate loads its weights for each call (device_map with offload)" in left.reason


def test_a_model_dispatched_after_the_patch_stays_fused(tiny_llama: Callable[..., nn.Module]) -> None:
    model, stock = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    report = slothplug.patch(model)
    moved(model)
    assert_same(step(model), step(stock))
    assert not report.idle()
