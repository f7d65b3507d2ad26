"""Configurations and runs: in this process, where many share the import, or by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from slothplug.integrations.hf import FastKernelsCallback
from slothplug.patching.private_class import is_patched
from slothplug.patching.served import STATE
from tests.equal_runs import assert_equal_runs
from tests.tiny_on_disk import write as write_files

REPOSITORY = Path(__file__).parents[2]
WEIGHTS = 1e-5
BASE = {
    "model_name_or_path": "model", "template": "default", "dataset_dir": ".", "cutoff_len": 128,
    "overwrite_output_dir": True, "do_train": True, "per_device_train_batch_size": 2, "max_steps": 4,
    "learning_rate": 0.003, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "seed": 3,
}  # fmt: skip
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
FULL = {"finetuning_type": "full"}
FREEZE = {"finetuning_type": "freeze", "freeze_trainable_layers": 1}
STAGES = {
    "sft": {"stage": "sft", "dataset": "sft"},
    "pt": {"stage": "pt", "dataset": "pt"},
    "dpo": {"stage": "dpo", "dataset": "dpo"},
    "kto": {"stage": "kto", "dataset": "kto"},
    "rm": {"stage": "rm", "dataset": "dpo"},
}
_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
DATASETS = {
    "sft": {"file_name": "sft.jsonl"},
    "pt": {"file_name": "sft.jsonl", "columns": {"prompt": "output"}},
    "dpo": {"file_name": "dpo.jsonl", "ranking": True, "columns": _PAIRS},
    "kto": {"file_name": "kto.jsonl", "columns": {"prompt": "prompt", "response": "answer", "kto_tag": "label"}},
}


def prepare(folder: Path) -> None:
    """``model/``, the rows of each stage, and ``dataset_info.json`` in ``folder``."""
    write_files(folder)
    pairs = [json.loads(line) for line in (folder / "dpo.jsonl").read_text().splitlines()]
    judged = [
        {"prompt": pair["prompt"], "answer": pair[kind], "label": kind == "chosen"}
        for pair in pairs
        for kind in ("chosen", "rejected")
    ]
    (folder / "kto.jsonl").write_text("\n".join(map(json.dumps, judged)) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps(DATASETS))


@dataclass
class Run:
    """What a training run logged, fused and saved."""

    folder: Path
    log: list[dict[str, Any]]
    fused: dict[str, int] = field(default_factory=dict)
    since_patched: list[str] = field(default_factory=list)
    reference: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    callbacks: list[FastKernelsCallback] = field(default_factory=list)

    def logged(self, key: str) -> list[float]:
        return [float(entry[key]) for entry in self.log if key in entry]

    def weights(self) -> dict[str, torch.Tensor]:
        files = [*self.folder.glob("adapter_model.safetensors"), *self.folder.glob("model.safetensors")]
        weights = load_file(files[0])
        head = self.folder / "value_head.safetensors"
        return weights | (load_file(head) if head.exists() else {})


class Recorder(TrainerCallback):
    """A callback of the tests, which keeps what a run in this process came to."""

    def __init__(self) -> None:
        self.run = Run(Path(), [])

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        trainer = _trainer()
        served = [module.__dict__[STATE] for module in model.modules() if is_patched(module)]
        self.run.fused = dict(Counter(one.op for one in served if getattr(one, "op", "graphs") != "graphs"))
        self.run.fallbacks = dict(sum((one.calls.fallbacks for one in served if hasattr(one, "calls")), Counter()))
        self.run.callbacks = [
            callback for callback in trainer.callback_handler.callbacks if isinstance(callback, FastKernelsCallback)
        ]
        for callback in self.run.callbacks:
            self.run.since_patched += callback.report.since_patched()
        reference = getattr(trainer, "ref_model", None)
        self.run.reference = sum(map(is_patched, reference.modules())) if reference is not None else 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.log = list(state.log_history)


def _trainer() -> Any:
    from slothplug.integrations.hf.callback import _calling_trainer

    return _calling_trainer()


def stock(args: dict[str, Any], callbacks: list[Any]) -> None:
    """LLaMA-Factory's own."""
    from llamafactory.train.tuner import run_exp

    run_exp(args, callbacks)


def pair(workplace: Path, name: str, flag: object = True, **keys: Any) -> tuple[Run, Run]:
    """By our ``run_exp`` and then by LLaMA-Factory's, where what the first left in the process would show."""
    from slothplug.integrations.llamafactory import run_exp

    on = train(workplace, f"{name}-on", run_exp, use_fast_kernels=flag, **keys)
    off = train(workplace, f"{name}-off", stock, **keys)
    return on, off


def assert_equal(on: Run, off: Run, *logged: str) -> None:
    assert_equal_runs(on, off, logged, WEIGHTS)


def assert_served(on: Run, off: Run, fallbacks: Collection[str] = ()) -> None:
    """One callback patched the first run's model, the second's is stock, and calls fell back for these reasons only."""
    assert (off.fused, off.callbacks, len(on.callbacks)) == ({}, [], 1)
    assert on.fallbacks.keys() == set(fallbacks)


def configuration(workplace: Path, name: str, **keys: Any) -> dict[str, Any]:
    """The keys of a run ``name`` beside those of ``BASE``; one that is None is left out."""
    content = BASE | {"output_dir": str(workplace / name)} | keys
    return {key: value for key, value in content.items() if value is not None}


def train(workplace: Path, name: str, run_exp: Callable[..., None], **keys: Any) -> Run:
    """Trains in this process by ``run_exp``, LLaMA-Factory's or ours."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        run_exp(configuration(workplace, name, **keys), [recorder])
    recorder.run.folder = workplace / name
    return recorder.run


def write(workplace: Path, name: str, **keys: Any) -> Path:
    """The YAML of a run."""
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(configuration(workplace, name, **keys)))
    return path


def read(folder: Path) -> Run:
    """What a command's run logged and saved."""
    return Run(folder, json.loads((folder / "trainer_state.json").read_text())["log_history"])


def command(workplace: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of this interpreter's environment in ``workplace``, with this repository's slothplug."""
    scripts = sysconfig.get_path("scripts")
    inherited = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    inherited.pop("TRITON_INTERPRET", None)
    first = sys.executable if words[0] == "python" else str(Path(scripts, words[0]))
    return subprocess.run(
        [first, *words[1:]],
        capture_output=True, text=True, timeout=280, cwd=workplace, env=inherited | environment,
    )  # fmt: skip
