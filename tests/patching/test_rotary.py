"""Rotary sites of whole models: one model changes, no module global does, and the numbers are stock's."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from slothplug.patching.private_class import is_patched, stock_class
from tests.patching.architectures import ARCHITECTURES, IDS, LABELS, assert_same_step, step, tiny
from tests.patching.device import DEVICE
from tests.patching.rotary import rotary_report


def module_globals(model: nn.Module) -> dict[str, dict[str, int]]:
    """Identity of every global of every module in which a class of the model is defined."""
    names = {stock_class(module).__module__ for module in model.modules()}
    return {name: {key: id(value) for key, value in vars(sys.modules[name]).items()} for name in names}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_every_gradient_equal_stock(architecture: str) -> None:
    model, stock = tiny(architecture), tiny(architecture)
    expected = step(stock)
    classes, before = [type(m) for m in model.modules()], module_globals(model)
    attributes = [set(m.__dict__) for m in model.modules()]
    report = rotary_report(model)
    assert_same_step(step(model), expected, architecture)
    assert report.fused
    assert not report.left
    for site in report.fused:
        assert site.calls.served, site.name
        assert site.calls.backward, site.name
        assert not site.calls.fallbacks, site.name
    assert module_globals(model) == before
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


@pytest.mark.parametrize("architecture", ["llama", "phi3", "deepseek_v3"])
def test_positions_may_differ_from_row_to_row(architecture: str) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/477: tables with a batch dimension were read as if shared."""
    model, stock = tiny(architecture), tiny(architecture)
    rotary_report(model)
    packed = torch.stack([torch.cat([torch.arange(12), torch.arange(8)]), torch.arange(100, 120)])
    shared = torch.arange(20)[None]
    for position_ids in (packed, shared):
        assert_same_step(step(model, position_ids=position_ids), step(stock, position_ids=position_ids))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_are_served_in_the_recompute_too(use_reentrant: bool) -> None:
    model, stock = tiny("llama"), tiny("llama")
    report = rotary_report(model)
    for checkpointed in (model, stock):
        checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_step(step(model), step(stock))
    for site in report.fused:
        assert site.calls.served == 2
        assert site.calls.backward == 1


def test_a_copy_trains_alone() -> None:
    model = tiny("llama")
    report = rotary_report(model)
    duplicate = copy.deepcopy(model)
    report.undo()
    assert not any(is_patched(module) for module in model.modules())
    assert_same_step(step(duplicate), step(model))
    assert all(p is not q for p, q in zip(model.parameters(), duplicate.parameters(), strict=True))
    served = report.fused[0].calls.served
    assert served
    step(model)
    assert report.fused[0].calls.served == served


def test_models_beside_the_patched_one_stay_stock() -> None:
    model, other = tiny("llama"), tiny("llama")
    report = rotary_report(model)
    step(other)
    assert all(site.calls.served == 0 for site in report.fused)


def test_bfloat16_and_autocast_are_served() -> None:
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model, stock = tiny("llama").to(dtype), tiny("llama").to(dtype)
        report = rotary_report(model)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            got, expected = (m(input_ids=IDS, labels=LABELS) for m in (model, stock))
        torch.testing.assert_close(got.loss, expected.loss, rtol=2e-2, atol=0)
        assert got.logits.dtype == expected.logits.dtype
        for site in report.fused:
            assert site.calls.served
            assert not site.calls.fallbacks
