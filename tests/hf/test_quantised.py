"""QLoRA in the Trainer: a model loaded in 4 bits trains with the flag as it does without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from slothplug.integrations.hf import FastKernelsCallback
from tests.hf.tiny import VOCABULARY, RecordingTrainer, arguments, rows, with_lora

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def on_disk(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def in_four_bits(folder: Path, compute: torch.dtype, dtype: torch.dtype, checkpointing: bool) -> nn.Module:
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, dtype=dtype)
    return with_lora(prepare_model_for_kbit_training(base, checkpointing))


def train(folder: Path, fast: bool, compute: torch.dtype, dtype: torch.dtype, **options: Any) -> RecordingTrainer:
    callback = FastKernelsCallback({"strict": True})
    trainer = RecordingTrainer(
        in_four_bits(folder / "model", compute, dtype, options.get("gradient_checkpointing", False)),
        arguments(folder, **{"max_steps": 10, "learning_rate": 3e-3, **options}),
        train_dataset=rows(32, "padded"),
        callbacks=[callback] if fast else [],
    )
    trainer.train()
    if fast:
        sites = [site for site in callback.report.fused if site.op == "lora"]
        assert len(sites) == 14
        assert not any(site.calls.fallbacks for site in sites)
        assert all(site.calls.served for site in sites)
    return trainer


def furthest(losses: list[float], exact: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, exact, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ten_steps_in_float32_have_the_stock_losses(tmp_path: Path, checkpointing: bool) -> None:
    on_disk(tmp_path / "model")
    options = {"gradient_checkpointing": checkpointing}
    if checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    fast, stock = (train(tmp_path, one, torch.float32, torch.float32, **options) for one in (True, False))
    assert fast.losses == pytest.approx(stock.losses, abs=1e-5)
    assert sum(stock.losses[-3:]) < sum(stock.losses[:3])


def test_ten_steps_under_autocast_have_the_stock_losses(tmp_path: Path) -> None:
    on_disk(tmp_path / "model")
    """No further from float32's than 1.5 times stock's are."""
    fast, stock = (train(tmp_path, one, torch.bfloat16, torch.bfloat16, bf16=True) for one in (True, False))
    exact = train(tmp_path, False, torch.float32, torch.float32)
    ours, theirs = (furthest(one.losses, exact.losses) for one in (fast, stock))
    assert ours <= 1.5 * theirs
    dtypes = [{name: p.dtype for name, p in one.model.named_parameters()} for one in (fast, stock)]
    assert dtypes[0] == dtypes[1]
