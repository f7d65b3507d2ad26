"""Tiny causal LMs whose head is patched, and one training step of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

import slothplug
from slothplug.patching.report import SiteReport
from tests.patching.device import DEVICE

IDS = (torch.arange(48, device=DEVICE).view(2, 24) * 7) % 120 + 4
LABELS = IDS.clone()
LABELS[:, :5] = -100
LABELS[1, -3:] = -100


def make(kind: str = "llama", seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random causal LM of a model type, with weights large enough for the loss to be far from uniform."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
                 "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**{**sizes, **changes}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.float().train()


def head_of(report: slothplug.Report) -> SiteReport:
    (site,) = [site for site in report.sites if site.op == "head"]
    return site


def patched(model: nn.Module, **settings: Any) -> SiteReport:
    """Patches the head alone, so that nothing but the head can differ from stock."""
    return head_of(slothplug.patch(model, {"ops": ["head"], **settings}))


def step(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": LABELS, **inputs}).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Any, expected: Any) -> None:
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            got[1][name], gradient, rtol=1e-4, atol=2e-6 * max(1.0, gradient.abs().max().item()), msg=name
        )


def lora(model: nn.Module, seed: int = 1, **changes: Any) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return model
