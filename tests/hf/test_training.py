"""Training with the flag is training without it: losses, gradients, checkpoints, adapter files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from slothplug.integrations.hf import FastKernelsCallback
from tests.hf.tiny import RecordingTrainer, arguments, llama, patched_modules, rows, with_lora

CHECKPOINTING = {
    "off": {},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "unset": {"gradient_checkpointing": True},
}


class Gradients(TrainerCallback):
    """Keeps every gradient of the first step, as the optimiser sees it."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if not self.seen:
            with_gradient = [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]
            self.seen = {name: gradient.clone() for name, gradient in with_gradient}


def _train(
    folder: Path, fast: bool, lora: bool, kind: str = "full", checkpointing: str = "off", **options: Any
) -> tuple[RecordingTrainer, dict[str, torch.Tensor]]:
    model = with_lora(llama()) if lora else llama()
    if lora and transformers.__version__.startswith("4."):
        model.enable_input_require_grads()  # what re-entrant checkpoints need; transformers 5 sees to it itself
    gradients = Gradients()
    defaults = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 5e-4}
    options = defaults | CHECKPOINTING[checkpointing] | options
    callbacks = [gradients, *([FastKernelsCallback()] if fast else [])]
    trainer = RecordingTrainer(model, arguments(folder, **options), train_dataset=rows(64, kind), callbacks=callbacks)
    trainer.train()
    return trainer, gradients.seen


def _assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, stock in expected.items():
        assert (got[name] - stock).abs().max() <= 1e-5 * stock.abs().max() + 1e-8, name


@pytest.mark.parametrize(
    ("lora", "kind"),
    [
        (True, "padded"),
        (False, "packed"),
        pytest.param(True, "packed", marks=pytest.mark.slow),
        pytest.param(False, "padded", marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_have_the_stock_loss_curve(tmp_path: Path, lora: bool, kind: str) -> None:
    options = {"max_steps": 50, "gradient_accumulation_steps": 4, "learning_rate": 3e-3 if lora else 5e-4}
    stock, _ = _train(tmp_path, False, lora, kind, **options)
    fast, _ = _train(tmp_path, True, lora, kind, **options)
    assert len(fast.losses) == 200
    assert max(abs(a - b) for a, b in zip(fast.losses, stock.losses, strict=True)) <= 1e-5
    assert sum(fast.losses[:32]) > sum(fast.losses[-32:]) + 0.3  # 32 micro-steps see every row once
    assert list(fast.model.state_dict()) == list(stock.model.state_dict())


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant", "unset"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_checkpointing_changes_no_gradient(tmp_path: Path, lora: bool, checkpointing: str) -> None:
    """https://github.com/huggingface/transformers/issues/42489: re-entrant checkpoints gave adapters no gradient."""
    stock, expected = _train(tmp_path, False, lora, "padded", checkpointing)
    fast, got = _train(tmp_path, True, lora, "padded", checkpointing)
    _, without = _train(tmp_path, True, lora, "padded")
    trainable = {name for name, parameter in fast.model.named_parameters() if parameter.requires_grad}
    assert got.keys() == trainable
    _assert_equal(got, expected)
    _assert_equal(got, without)
    assert fast.losses == pytest.approx(stock.losses, abs=1e-5)


def test_checkpointing_really_recomputes(tmp_path: Path) -> None:
    def calls(checkpointing: str) -> int:
        trainer, _ = _train(tmp_path, True, True, checkpointing=checkpointing)
        report = next(one.report for one in trainer.callback_handler.callbacks if isinstance(one, FastKernelsCallback))
        return next(site.calls.served for site in report.fused if site.name.endswith("layers.0.input_layernorm"))

    assert calls("not reentrant") == 2 * calls("off")


@pytest.mark.parametrize("order", ["model first", "adapters first"])
def test_checkpointing_enabled_by_hand(tmp_path: Path, order: str) -> None:
    def run(fast: bool) -> dict[str, torch.Tensor]:
        model = llama()
        kwargs = {"use_reentrant": True}
        if order == "model first":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            model.enable_input_require_grads()
        model = with_lora(model)
        if order == "adapters first":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        gradients = Gradients()
        callbacks = [gradients, *([FastKernelsCallback()] if fast else [])]
        RecordingTrainer(model, arguments(tmp_path), train_dataset=rows(8), callbacks=callbacks).train()
        return gradients.seen

    got = run(True)
    assert got
    _assert_equal(got, run(False))


def test_adapter_files_are_the_stock_ones(tmp_path: Path) -> None:
    files = {}
    for name, fast in (("stock", False), ("fast", True)):
        trainer, _ = _train(tmp_path, fast, True)
        trainer.save_model(tmp_path / name)
        files[name] = sorted(path.name for path in (tmp_path / name).iterdir())
    assert files["fast"] == files["stock"]
    assert (tmp_path / "fast/adapter_config.json").read_text() == (tmp_path / "stock/adapter_config.json").read_text()
    got, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("fast", "stock"))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(got[key], value, atol=1e-5), key


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_checkpoint_and_resume(tmp_path: Path, lora: bool) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _ = _train(tmp_path / "whole", True, lora, **options)
    model = with_lora(llama(), init_lora_weights=True) if lora else llama(seed=9)
    resumed = RecordingTrainer(
        model,
        arguments(tmp_path / "resumed", **(options | {"gradient_accumulation_steps": 2, "learning_rate": 5e-4})),
        train_dataset=rows(64),
        callbacks=[FastKernelsCallback()],
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert resumed.losses == pytest.approx(whole.losses[4:], abs=1e-6)
    if not lora:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/checkpoint-4")
        assert not patched_modules(loaded)
        for key, value in whole.model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value.cpu()), key


def test_copies_and_pickles_of_a_trained_model(tmp_path: Path) -> None:
    trainer, _ = _train(tmp_path, True, False)
    batch = torch.stack([row["input_ids"] for row in rows(2)])
    batch = batch.to(trainer.model.device)
    expected = trainer.model.eval()(batch).logits

    stock = pickle.loads(pickle.dumps(trainer.model))
    assert not patched_modules(stock)
    torch.testing.assert_close(stock(batch).logits, expected)

    duplicate = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    assert not torch.any(duplicate(batch).logits)
    assert torch.equal(trainer.model(batch).logits, expected)


@pytest.mark.skipif(
    "dataloader_multiprocessing_context" not in TrainingArguments.__dataclass_fields__,
    reason="this transformers has no dataloader_multiprocessing_context",
)
def test_spawned_data_workers(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "max_steps": 1, "dataloader_multiprocessing_context": "spawn"}
    trainer, _ = _train(tmp_path, True, False, **options)
    assert len(trainer.losses) == 2
