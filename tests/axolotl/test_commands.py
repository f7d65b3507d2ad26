"""Axolotl's own commands: launchers, preprocess, resume, merge-lora, inference, evaluate."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slothplug.patching.private_class import is_patched
from tests.axolotl.runs import BASE, LORA, OURS, RECORDER, command, load, read, train, write
from tests.axolotl.test_training import ADAPTERS, assert_equal

RUN = ["python", "-m", "slothplug.cli.main", "run"]


def test_slothplug_run_serves_the_flag_alone_with_axolotls_default_launcher(workplace: Path) -> None:
    """As a user's first run: neither the plugin nor a lora_*_kernel key, in the process that `accelerate` starts."""
    path = write(workplace, "launched", plugins=[RECORDER], use_fast_kernels=True, **LORA)
    done = command(workplace, *RUN, "axolotl", "train", path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "[INFO] [slothplug] slothplug: rms_norm 5/5 (torch); glu 2/2 (torch); rotary 2/2 (torch)" in said
    assert "│ lora     │    14 │    14 │    0 │" in said
    written = "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel, lora_embedding_kernel: false"
    note = f"note: Axolotl's own LoRA kernels, which it switches on by itself, are off: slothplug set {written}"
    assert " ".join(said.split()).count(note) == 1
    assert "sample_packing: true would remove it" in said
    assert '"use_fast_kernels": true' in said
    assert "slothplug: rms_norm" in (workplace / "launched" / "debug.log").read_text()
    assert read(workplace / "launched").operations["lora"]["fused"] == 14


def test_preprocess_then_train_then_resume_then_merge(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.cli.merge_lora import do_cli as merge
    from axolotl.cli.preprocess import do_cli as preprocess
    from axolotl.integrations.base import PluginManager

    monkeypatch.chdir(workplace)
    monkeypatch.setattr("sys.argv", ["axolotl"])
    keys = ADAPTERS | {"plugins": [RECORDER, OURS], "dataset_prepared_path": "prepared-apart"}
    path = write(workplace, "whole-on", use_fast_kernels=True, **keys)
    PluginManager.get_instance().plugins.clear()
    preprocess(config=str(path))
    prepared = sorted((workplace / "prepared-apart").rglob("*.arrow"))
    assert prepared

    del keys["plugins"]
    saving = keys | {"save_strategy": "steps", "save_steps": 2}
    whole = train(workplace, "whole-on", flag=True, **saving)
    assert sorted((workplace / "prepared-apart").rglob("*.arrow")) == prepared
    off = train(workplace, "whole-off", **saving)
    assert_equal(whole, off)

    checkpoint = str(workplace / "whole-on" / "checkpoint-2")
    resumed = train(workplace, "resumed", flag=True, resume_from_checkpoint=checkpoint, **saving)
    assert resumed.logged("loss") == whole.logged("loss")
    torch.testing.assert_close(resumed.weights(), whole.weights(), rtol=0, atol=0)  # the same kernels, the same bits

    merged = {}
    for name, method in (("whole-on", "memory_efficient"), ("whole-on", "legacy"), ("whole-off", "legacy")):
        PluginManager.get_instance().plugins.clear()
        merge(config=str(workplace / f"{name}.yml"), merge_method=method, lora_model_dir=str(workplace / name))
        merged[name, method] = load_file(workplace / name / "merged" / "model.safetensors")
    for weights in merged.values():
        torch.testing.assert_close(weights, merged["whole-off", "legacy"], rtol=1e-5, atol=1e-6)  # seen: 1.4e-7
    stock = load_file(workplace / BASE["base_model"] / "model.safetensors")
    assert not torch.equal(
        merged["whole-on", "legacy"]["model.layers.0.mlp.up_proj.weight"], stock["model.layers.0.mlp.up_proj.weight"]
    )


def test_inference_answers_as_without_the_flag(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.cli.utils import load_model_and_tokenizer

    monkeypatch.chdir(workplace)
    answers = []
    for flag in (True, None):
        path = write(workplace, "inference", plugins=[OURS], use_fast_kernels=flag)
        cfg = load(path, inference=True, rl=None)
        model, tokenizer, _ = load_model_and_tokenizer(cfg=cfg, inference=True)
        assert any(map(is_patched, model.modules())) == bool(flag)
        batch = tokenizer("the quick brown sloth", return_tensors="pt")
        answers.append(model.generate(input_ids=batch["input_ids"], max_new_tokens=12, do_sample=False))
    assert torch.equal(*answers)


def test_evaluate_measures_the_same_loss(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.cli.evaluate import do_cli as evaluate
    from axolotl.integrations.base import PluginManager

    monkeypatch.chdir(workplace)
    monkeypatch.setattr("sys.argv", ["axolotl"])
    losses = []
    for flag in (True, None):
        name = f"evaluate-{flag}"
        path = write(workplace, name, plugins=[OURS], use_fast_kernels=flag, val_set_size=8)
        PluginManager.get_instance().plugins.clear()
        evaluate(config=str(path))
        with (workplace / name / "eval_summary.csv").open() as file:
            (row,) = [row for row in csv.reader(file) if row[0] == "loss"]
        losses.append([float(value) for value in row[1:]])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
