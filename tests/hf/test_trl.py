"""TRL's trainers: supervised fine-tuning, and preferences with a reference model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from slothplug.integrations.hf import FastKernelsCallback, frontdoor
from tests.hf.tiny import VOCABULARY, arguments, llama, patched_modules, with_lora

try:
    from trl import DPOConfig, DPOTrainer
except RuntimeError as error:  # TRL 0.24 beside transformers 5 takes packages that are absent for installed ones
    no_dpo = f"TRL {trl.__version__} has no DPOTrainer beside transformers {transformers.__version__}: {error}"
else:
    no_dpo = ""

needs_dpo = pytest.mark.skipif(bool(no_dpo), reason=no_dpo)

WORDS = [f"w{index}" for index in range(VOCABULARY - 3)]
TEXTS = [" ".join(WORDS[(start + 5 * step) % len(WORDS)] for step in range(6 + start % 5)) for start in range(16)]


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.read: list[float] = []
        """What TRL's trainers read from the logits, after the loss."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self.seen.append(float(logs["loss"]))
            self.read += [float(logs[name]) for name in ("entropy", "mean_token_accuracy") if name in logs]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}, "<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _sft(folder: Path, tokenizer: Any, model: nn.Module, *callbacks: TrainerCallback, **flag: Any) -> SFTTrainer:
    args = arguments(folder, SFTConfig, bf16=False, logging_strategy="steps", logging_steps=1, max_steps=3, **flag)
    return SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def _dpo(
    folder: Path, tokenizer: Any, model: nn.Module, reference: Any, *callbacks: TrainerCallback, **flag: Any
) -> DPOTrainer:
    args = arguments(folder, DPOConfig, bf16=False, logging_strategy="steps", logging_steps=1, max_steps=3, **flag)
    pairs = {"prompt": TEXTS, "chosen": [" w1 w6"] * len(TEXTS), "rejected": [" w2 w9 w4"] * len(TEXTS)}
    return DPOTrainer(
        model,
        reference,
        args,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("way", ["callback", "flag"])
def test_sft(tmp_path: Path, tokenizer: Any, way: str, lora: bool) -> None:
    def run(fast: str) -> list[float]:
        losses, flag, callbacks = Losses(), {}, []
        if fast == "callback":
            callbacks = [FastKernelsCallback()]
        if fast == "flag":
            frontdoor.install()
            flag = {"use_fast_kernels": True}
        model = with_lora(llama()) if lora else llama()
        trainer = _sft(tmp_path, tokenizer, model, losses, *callbacks, **flag)
        trainer.train()
        assert bool(patched_modules(model)) == (fast != "")
        if fast:
            check_that_nothing_was_fused_in_vain(trainer)
        assert (len(losses.seen), len(losses.read)) == (3, 6)
        return losses.seen + losses.read

    stock = run("")
    assert run(way) == pytest.approx(stock, abs=1e-5)


def check_that_nothing_was_fused_in_vain(trainer: Any) -> None:
    """Where TRL computes the loss itself, from the head's weight, the report says so; else the fused head served."""
    ours = next(one for one in trainer.callback_handler.callbacks if isinstance(one, FastKernelsCallback))
    assert ours.report.idle() == {}
    [head] = ours.report.by_op()["head"]
    assert head.status == "fused" or head.reason == "TRL's own fused head computes the loss of this model"
    assert not head.calls.fallbacks, "entropy and accuracy need no logits"
    assert not head.calls.remarks, "their reader was declared when the trainer was built"


@needs_dpo
@pytest.mark.parametrize("way", ["callback", "flag"])
def test_dpo_patches_policy_and_reference(tmp_path: Path, tokenizer: Any, way: str) -> None:
    def run(fast: str) -> list[float]:
        losses, flag, callbacks = Losses(), {}, []
        if fast == "callback":
            callbacks = [FastKernelsCallback()]
        if fast == "flag":
            frontdoor.install()
            flag = {"use_fast_kernels": True}
        policy, reference = llama(0), llama(5)
        trainer = _dpo(tmp_path, tokenizer, policy, reference, losses, *callbacks, **flag)
        trainer.train()
        for model in (policy, reference):
            assert bool(patched_modules(model)) == (fast != "")
        if fast:
            ours = next(one for one in trainer.callback_handler.callbacks if isinstance(one, FastKernelsCallback))
            assert all(site.calls.served for site in ours.reference_report.fused if site.op == "rms_norm")
            ours.report.undo()
            assert not patched_modules(policy)
            assert patched_modules(reference)
            ours.reference_report.undo()
            assert not patched_modules(reference)
        return losses.seen

    stock = run("")
    assert len(stock) == 3
    assert run(way) == pytest.approx(stock, abs=1e-5)


@needs_dpo
def test_dpo_with_adapters_needs_no_reference(tmp_path: Path, tokenizer: Any) -> None:
    """The reference is the same model with its adapters disabled."""

    def run(*callbacks: TrainerCallback) -> list[float]:
        losses = Losses()
        model = with_lora(llama())
        trainer = _dpo(tmp_path, tokenizer, model, None, losses, *callbacks)
        trainer.train()
        return losses.seen

    fast = FastKernelsCallback()
    got = run(fast)
    assert fast.reference_report is None
    assert got == pytest.approx(run(), abs=1e-5)
    assert min(got) < math.log(2) - 1e-3  # the policy moved away from the reference
