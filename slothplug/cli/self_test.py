"""The doctor's last question: does one training step of a patched model work here?"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import slothplug


def self_test(device: torch.device) -> str:
    """Trains a one-layer Llama for one step on ``device`` with the flag on, with LoRA where PEFT is installed.

    Returns what was fused.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(device)
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    report = slothplug.patch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32, device=device).view(1, -1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    if not loss.isfinite():
        raise ArithmeticError(f"the loss of the first step is {loss.item()}")
    return report.summary().removeprefix("slothplug: ")
