"""The same configuration with the flag off and on: equal losses, gradient norms, evaluations and saved weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slothplug.integrations.llamafactory import run_exp as ours
from tests.llamafactory.runs import FREEZE, FULL, LORA, STAGES, assert_equal, assert_served, pair, stock, train

METHODS = {"lora": LORA, "full": FULL, "freeze": FREEZE}
EVALUATED = {"val_size": 8, "eval_strategy": "steps", "eval_steps": 2}
LOGITS = {"rms_norm": 5, "glu": 2, "rotary": 2}
LOSS = LOGITS | {"head": 1}
ADAPTERS = {"lora": 14}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", STAGES)
def test_stages(workplace: Path, stage: str, method: str) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/5542: beside a fused loss DPO found no logits."""
    # The bias of a reward model's head has no gradient but rounding, which Adam would make a step of.
    keys = {"optim": "sgd", "learning_rate": 0.1} if stage == "rm" else {}
    on, off = pair(workplace, f"{stage}-{method}", **STAGES[stage], **METHODS[method], **keys)
    assert_equal(on, off)
    # With adapters, DPO's and KTO's reference is the model with its adapters off.
    assert_served(on, off, fallbacks={"adapters are disabled"} if stage in ("dpo", "kto") and method == "lora" else ())
    assert on.fused == (LOSS if stage in ("sft", "pt") else LOGITS) | (ADAPTERS if method == "lora" else {})
    notes = on.callbacks[0].report.notes
    assert any(f"because stage: {stage} reads them" in note for note in notes) == (stage not in ("sft", "pt"))
    assert (on.reference > 0, off.reference) == (stage in ("dpo", "kto") and method != "lora", 0)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_twenty_steps_with_accumulation_and_evaluation(workplace: Path, method: str) -> None:
    keys = EVALUATED | {"eval_steps": 10, "max_steps": 20, "gradient_accumulation_steps": 2}
    on, off = pair(workplace, f"long-{method}", **STAGES["sft"], **METHODS[method], **keys)
    assert_equal(on, off, "eval_loss")
    assert len(on.logged("loss")) == 20
    assert len(on.logged("eval_loss")) == 3
    assert_served(on, off)


OPTIONS: dict[str, dict[str, Any]] = {
    "no-checkpointing": {"disable_gradient_checkpointing": True},
    "checkpointing-not-reentrant-and-dropout": {"use_reentrant_gc": False, "lora_dropout": 0.1},
    "checkpointing-and-dropout": {"lora_dropout": 0.1},
    "upcast": {"upcast_layernorm": True, "upcast_lmhead_output": True},
    "neftune": {"neftune_noise_alpha": 5},
    "pissa": {"pissa_init": True},
    "rslora": {"use_rslora": True},
    "loraplus": {"loraplus_lr_ratio": 16},
    "additional-target": {"additional_target": "embed_tokens,lm_head"},
    "packing": {"neat_packing": True},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(workplace: Path, option: str) -> None:
    on, off = pair(workplace, option, **STAGES["sft"], **LORA, **OPTIONS[option])
    assert_equal(on, off)
    assert_served(on, off)
    assert on.fused.items() >= (LOGITS | ADAPTERS).items()
    if option == "packing":
        assert "graphs: 2 layers recorded for 1 shape," in str(on.since_patched)


def test_dora_adapters_are_left_and_the_rest_is_served(workplace: Path) -> None:
    on, off = pair(workplace, "dora", **STAGES["sft"], **LORA, use_dora=True)
    assert_equal(on, off)
    assert_served(on, off)
    assert on.fused == LOSS
    assert "lora 0/14" in on.callbacks[0].report.summary()


@pytest.mark.parametrize("key", ["use_dft_loss", "use_eaft_loss", "use_asft_loss"])
def test_losses_that_read_logits(workplace: Path, key: str) -> None:
    # LLaMA-Factory builds no reference model beside adapters, and ASFT's loss calls it.
    method = FULL if key == "use_asft_loss" else LORA
    on, off = pair(workplace, key, **STAGES["sft"], **method, **{key: True})
    assert_equal(on, off)
    assert on.fused == LOGITS | (ADAPTERS if method is LORA else {})
    assert any(f"because {key}: true reads them" in note for note in on.callbacks[0].report.notes)


def test_an_evaluation_that_reads_logits(workplace: Path) -> None:
    """The head serves the training steps, and the evaluation gets logits."""
    on, off = pair(workplace, "accuracy", **STAGES["sft"], **LORA, **EVALUATED, compute_accuracy=True)
    assert_equal(on, off, "eval_loss", "eval_accuracy")
    assert_served(on, off)
    assert on.fused == LOSS | ADAPTERS


def test_evaluation_alone(workplace: Path) -> None:
    """As the web UI's tab for it: ``use_unsloth: true`` in it, and nothing is trained."""
    found = []
    for name, run_exp in (("evaluate-on", ours), ("evaluate-off", stock)):
        keys = STAGES["sft"] | LORA | {"do_train": False, "do_eval": True, "dataset": None, "eval_dataset": "sft"}
        keys |= {"use_unsloth": run_exp is ours or None, "compute_accuracy": True}
        train(workplace, name, run_exp, **keys)
        results = json.loads((workplace / name / "eval_results.json").read_text())
        found.append([results["eval_loss"], results["eval_accuracy"]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_bfloat16(workplace: Path) -> None:
    """float32 adapters under autocast: from stock at most 1.5 times as far as stock with another attention is; pooled
    over seeds and steps, since single runs drift apart by chance.
    """
    keys = STAGES["sft"] | LORA | {"bf16": True, "upcast_layernorm": True}
    far: dict[str, list[float]] = {"slothplug": [], "eager attention": []}
    for seed in range(3, 9):
        on, off = pair(workplace, "bfloat16", **keys, seed=seed)
        assert_served(on, off)
        assert on.fused == LOSS | ADAPTERS
        eager = train(workplace, "bfloat16-eager", stock, **keys, seed=seed, flash_attn="disabled")
        for name, run in (("slothplug", on), ("eager attention", eager)):
            far[name] += [a - b for a, b in zip(run.logged("loss"), off.logged("loss"), strict=True)]
    rms = {name: math.sqrt(sum(value**2 for value in values) / len(values)) for name, values in far.items()}
    print(f"losses beside stock's, root mean square of the differences: {rms}")
    assert 0 < rms["slothplug"] <= 1.5 * rms["eager attention"]


def test_resume(workplace: Path) -> None:
    keys = STAGES["sft"] | LORA | {"save_strategy": "steps", "save_steps": 2}
    whole, off = pair(workplace, "whole", **keys)
    assert_equal(whole, off)
    checkpoint = str(workplace / "whole-on" / "checkpoint-2")
    resumed = train(workplace, "resumed", ours, use_fast_kernels=True, resume_from_checkpoint=checkpoint, **keys)
    assert_equal(resumed, whole)
    assert resumed.fused == whole.fused


def test_an_adapter_is_trained_further(workplace: Path) -> None:
    keys = STAGES["sft"] | LORA
    first, _ = pair(workplace, "first", **keys)
    on, off = pair(workplace, "second", **keys, adapter_name_or_path=str(first.folder))
    assert_equal(on, off)
    assert on.fused == LOSS | ADAPTERS
    assert on.logged("loss")[0] < first.logged("loss")[0]
