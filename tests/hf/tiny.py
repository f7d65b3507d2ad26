"""Small models, rows and trainers in float32, on the GPU of a machine that has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64


def llama(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide a wrong A
                parameter.normal_(std=0.02)
    return adapted


def rows(count: int, kind: str = "full", length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Rows that can be learnt, of equal length: ``full``, ``padded`` on the right by up to half, ``packed`` fives."""
    generator = torch.Generator().manual_seed(2)
    result = []
    for index in range(count):
        start = torch.randint(VOCABULARY, (1,), generator=generator)
        tokens = 3 + (start + 7 * torch.arange(length)) % (VOCABULARY - 3)
        row = {"input_ids": tokens, "labels": tokens.clone()}
        if kind == "padded":
            kept = length - index % (length // 2)
            row["input_ids"][kept:] = 0
            row["labels"][kept:] = -100
            row["attention_mask"] = (torch.arange(length) < kept).long()
        if kind == "packed":
            row["position_ids"] = torch.arange(length) % 5
            row["labels"][row["position_ids"] == 0] = -100
        result.append(row)
    return result


def arguments(folder: Path, cls: type[TrainingArguments] = TrainingArguments, **options: Any) -> TrainingArguments:
    defaults = {
        "output_dir": str(folder), "use_cpu": not torch.cuda.is_available(), "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no", "per_device_train_batch_size": 2, "max_steps": 2,
        "learning_rate": 1e-3, "seed": 3,
    }  # fmt: skip
    return cls(**(defaults | options))


class RecordingTrainer(Trainer):
    """Keeps the loss of every micro-step as the model returned it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def patched_modules(model: nn.Module) -> list[str]:
    from slothplug.patching.private_class import is_patched

    return [name for name, module in model.named_modules() if is_patched(module)]
