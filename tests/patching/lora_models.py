"""Tiny PEFT models with LoRA layers, and one training step of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import slothplug
from slothplug.patching.report import Report
from tests.patching.device import DEVICE

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = 2
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.randint(3, 60, (3, 10), generator=torch.Generator(DEVICE).manual_seed(5), device=DEVICE)

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]


def model(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A tiny model with adapters whose B is not zero and biases that are not."""
    torch.manual_seed(0)
    base = (
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
        if kind == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    ).to(dtype)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    defaults: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(PROJECTIONS),
        "init_lora_weights": False,
    }
    adapted = get_peft_model(base, LoraConfig(**{**defaults, **config}))
    adapted.config.use_cache = False
    return adapted.train()


def patch(patched: nn.Module, **settings: Any) -> Report:
    return slothplug.patch(patched, {"ops": ["lora"], **settings})


def pair(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """A patched model, its unpatched copy, and the report."""
    fast = model(kind, dtype, **config)
    stock = copy.deepcopy(fast)
    return fast, stock, patch(fast)


def step(one: nn.Module, seed: int = 3, autocast: bool = False) -> Outcome:
    one.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = one(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


def logits(one: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return one(input_ids=IDS).logits


def assert_equal(ours: Outcome, stock: Outcome, tolerance: float = 2e-5) -> None:
    """Losses and gradients, the latter relative to each one's norm."""
    assert ours[1].keys() == stock[1].keys()
    torch.testing.assert_close(ours[0], stock[0], rtol=tolerance, atol=tolerance)
    for name, expected in stock[1].items():
        got = ours[1][name]
        assert got.dtype is expected.dtype, name
        error = (got - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: {error:.1e}"


def fallbacks(report: Report) -> dict[str, int]:
    total: dict[str, int] = {}
    for site in report.fused:
        for reason, count in site.calls.fallbacks.items():
            total[reason] = total.get(reason, 0) + count
    return total


def layer(one: nn.Module, name: str) -> nn.Module:
    return next(module for path, module in one.named_modules() if path.endswith(name))
