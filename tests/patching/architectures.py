"""Tiny models of architectures that differ in how they rotate and how they gate, and one training step of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

IDS = torch.arange(3, 43).view(2, 20)
LABELS = torch.where(torch.arange(20) < 4, -100, IDS)

_COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 16},
    "phi3": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    "gpt_neox": {"rotary_pct": 0.25},
    "stablelm": {"partial_rotary_factor": 0.25},
    "ernie4_5": {},
    "olmo2": {},
    "deepseek_v3": _LATENT,
}


def tiny(architecture: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model in training mode; skips the test where this transformers does not have the architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(architecture, **{**_COMMON, **ARCHITECTURES[architecture], **changes})
    except ValueError as error:
        pytest.skip(f"this transformers has no {architecture}: {error}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    return model


def step(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and every gradient of one training step, from one state of the generator."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(input_ids=IDS, labels=LABELS, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got: tuple[Any, dict[str, Any]], expected: tuple[Any, dict[str, Any]]) -> None:
    """Float32 steps that differ by the order of roundings only.

    Some gradients (a key's bias, to which softmax is blind) are sums that cancel: they are measured by the size of the
    model's gradients, not by their own.
    """
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=2e-6, atol=1e-6)
    largest = max(gradient.abs().max().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-6 * largest, msg=name)
