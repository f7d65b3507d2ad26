"""A whole patched model in mixed precision: no dtype error, and gradients in the parameters' dtypes, as unpatched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from tests.hf.tiny import llama, with_lora
from tests.patching.device import DEVICE

IDS = 3 + (torch.arange(24).view(2, 12) * 7) % 60
LOW = [torch.bfloat16, torch.float16]


def both(model: nn.Module, checkpointing: bool) -> tuple[nn.Module, nn.Module]:
    """A patched model and its unpatched copy."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fast = copy.deepcopy(model)
    report = slothplug.patch(fast)
    assert not report.left
    return fast, model


def step(model: nn.Module, **autocast: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients; backward runs outside the autocast region, as a trainer's does."""
    model.zero_grad()
    with torch.autocast(DEVICE, **autocast):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], low: torch.dtype) -> None:
    assert got.keys() == expected.keys()
    for name, stock in expected.items():
        assert got[name].dtype is stock.dtype, name
        # Both round every layer's activations to ``low``, in another order: a few units of the whole gradient.
        assert (got[name] - stock).norm() <= 8 * torch.finfo(low).eps * stock.norm(), name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_float32_parameters_under_autocast_with_a_trained_head(low: torch.dtype, checkpointing: bool) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/501, https://github.com/hiyouga/LlamaFactory/issues/5583"""
    fast, stock = both(llama(), checkpointing)
    got = step(fast, dtype=low)
    assert {gradient.dtype for gradient in got.values()} == {torch.float32}
    assert "lm_head.weight" in got
    assert_close(got, step(stock, dtype=low), low)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_float32_adapters_on_a_low_precision_base(low: torch.dtype, autocast: bool, checkpointing: bool) -> None:
    """https://github.com/unslothai/unsloth/issues/212, https://github.com/unslothai/unsloth/issues/3723"""
    adapted = with_lora(llama().to(low))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    fast, stock = both(adapted, checkpointing)
    options = {"dtype": low, "enabled": autocast}
    for _ in range(2):
        got = step(fast, **options)
        assert {gradient.dtype for name, gradient in got.items() if "lora_" in name} == {torch.float32}
        assert_close(got, step(stock, **options), low)
        for model in (fast, stock):
            assert model.eval().generate(input_ids=IDS[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)
            model.train()
