"""Models of dtypes that few kernels know: served where that is proved, otherwise left with a reason in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import slothplug
from tests.patching.architectures import IDS, tiny
from tests.patching.device import DEVICE

OPS = ["rms_norm", "rotary", "glu", "lora"]


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def with_lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [lambda: tiny("llama"), lambda: with_lora(tiny("llama"))], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_dtype_without_kernels_is_the_reason(
    dtype: torch.dtype, make: Callable[[], nn.Module], autocast: bool
) -> None:
    model = converted(make(), dtype)
    with (
        pytest.warns(slothplug.NothingFusedWarning),
        torch.autocast(DEVICE, torch.bfloat16, enabled=autocast),
    ):
        report = slothplug.patch(model, {"ops": OPS})
    assert {site.reason for site in report.left} == {f"no kernel for {DEVICE} and {dtype}"}


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_float16_siblings_are_served_under_an_autocast_of_either_dtype(lower: torch.dtype) -> None:
    """autocast's promotion for torch.cat knows float32 and its own dtype, and raises for float16 under bfloat16."""
    model, stock = (with_lora(tiny("llama")).half() for _ in range(2))
    report = slothplug.patch(model, {"ops": ["lora"]})
    assert not report.left
    got, expected = [], []
    for one, outputs in ((model, got), (stock, expected)):
        with torch.autocast(DEVICE, lower):
            outputs.append(one(input_ids=IDS).logits)
        outputs[0].float().square().mean().backward()
        outputs += [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2 * theirs.abs().max().item())
    assert all(site.calls.served for site in report.fused[:3])  # the first layer, whose input is float16
