"""One tiny Llama, trained whole or by adapters, with every operation patched; and one training step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import slothplug
from slothplug.patching.report import Report
from tests.patching.device import DEVICE

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]


def full() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def lora() -> nn.Module:
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(full(), peft.LoraConfig(**options))


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Report]:
    """A patched model, a stock one, and the report."""
    model, stock = make(), make()
    report = slothplug.patch(model)
    assert not report.left
    return model, stock, report


def step(model: nn.Module, **inputs: Any) -> Outcome:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("_orig_mod."): parameter for name, parameter in model.named_parameters()}
    return {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}


def assert_same(got: Outcome, expected: Outcome, tolerance: float = 2e-5) -> None:
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    for name, gradient in expected[1].items():
        assert got[1][name].dtype is gradient.dtype, name
        finite = gradient.isfinite()
        assert torch.equal(got[1][name].isfinite(), finite), name
        error = (got[1][name] - gradient)[finite].norm() / gradient[finite].norm().clamp_min(1e-6)
        assert error <= 5 * tolerance, f"{name}: {error:.1e}"


def reasons(report: Report) -> set[str]:
    return {reason for site in report.fused for reason in site.calls.fallbacks}


def core(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model
