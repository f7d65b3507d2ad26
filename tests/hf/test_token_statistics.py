"""Trainers that read entropy and argmax of the logits are known when they are built: the loss records both for them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slothplug.integrations.hf import FastKernelsCallback
from slothplug.integrations.hf.token_statistics import reads_token_statistics
from tests.hf.tiny import arguments, llama

ROWS = [{"input_ids": list(range(3, 15)), "labels": [-100] * 4 + list(range(7, 15))}] * 8


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


class Reads(transformers.Trainer):
    """What TRL 0.24's SFTTrainer does with the logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **options)
        with torch.no_grad():
            self.read = entropy_from_logits(outputs.logits), outputs.logits[..., :-1, :].contiguous().argmax(-1)
        return (loss, outputs) if return_outputs else loss


class SFTTrainer(Reads):
    compute_loss = Reads.compute_loss


SFTTrainer.__module__ = "trl.trainer.sft_trainer"


def run(folder: Path, cls: type[transformers.Trainer], *callbacks: Any) -> Any:
    args = arguments(folder, transformers.TrainingArguments, max_steps=2)
    trainer = cls(llama(), args, train_dataset=ROWS, callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize("cls", [SFTTrainer, type("Derived", (SFTTrainer,), {})])
def test_a_trainer_of_trl_that_reads_them_gets_them_from_the_first_loss_on(tmp_path: Path, cls: Any) -> None:
    callback = FastKernelsCallback({"ops": ["head"]})
    trainer, stock = run(tmp_path, cls, callback), run(tmp_path, cls)
    torch.testing.assert_close(trainer.read[0], stock.read[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(trainer.read[1], stock.read[1])
    assert callback.report is not None
    [head] = callback.report.by_op()["head"]
    assert (head.calls.served, dict(head.calls.fallbacks), dict(head.calls.remarks)) == (2, {}, {})


def test_a_reader_that_is_not_known_is_named_in_the_report(tmp_path: Path) -> None:
    callback = FastKernelsCallback({"ops": ["head"]})
    run(tmp_path, Reads, callback)
    assert "record_statistics" in str(callback.report)


def test_which_trainers_read_them(tmp_path: Path) -> None:
    args = arguments(tmp_path, transformers.TrainingArguments)
    assert not reads_token_statistics(None)
    assert not reads_token_statistics(transformers.Trainer(llama(), args))
    trainer = SFTTrainer(llama(), args)
    assert reads_token_statistics(trainer)
    trainer.args.use_liger_kernel = True
    assert not reads_token_statistics(trainer)


def test_the_installed_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    trainer = object.__new__(trl.SFTTrainer)
    trainer.args = arguments(tmp_path, transformers.TrainingArguments)
    source = inspect.getsource(trl.SFTTrainer.compute_loss)
    assert reads_token_statistics(trainer) == ("entropy_from_logits(" in source)
