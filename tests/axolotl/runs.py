"""Configurations and runs: in this process, where many share the import, or by command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[2]
OURS = "slothplug.integrations.axolotl.SlothplugPlugin"
RECORDER = "tests.axolotl.recorder.Recorder"
LORA = {
    "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
# Axolotl switches these on by itself, and they need CUDA.
WITHOUT_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
DPO = {
    "rl": "dpo",
    "datasets": [{"path": "dpo.jsonl", "ds_type": "json", "split": "train", "type": {
        "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
        "prompt_format": "{prompt}", "chosen_format": "{chosen}", "rejected_format": "{rejected}",
    }}],
}  # fmt: skip
BASE = {
    "base_model": "model", "tokenizer_type": "AutoTokenizer", "model_type": "AutoModelForCausalLM",
    "datasets": [{"path": "sft.jsonl", "ds_type": "json", "type": "alpaca"}], "dataset_num_proc": 1,
    "dataset_prepared_path": "prepared", "val_set_size": 0, "sequence_len": 256, "sample_packing": False,
    "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "num_epochs": 1,
    "optimizer": "adamw_torch", "learning_rate": 0.003, "lr_scheduler": "constant", "logging_steps": 1,
    "save_strategy": "no", "bf16": False, "fp16": False, "tf32": False, "gradient_checkpointing": False,
    "attn_implementation": "eager", "seed": 3,
}  # fmt: skip


@dataclass
class Run:
    """What a training run logged, and the folder of what it saved."""

    folder: Path
    record: dict[str, Any]

    def logged(self, key: str) -> list[float]:
        return [float(entry[key]) for entry in self.record["log"] if key in entry]

    @property
    def operations(self) -> dict[str, Any]:
        found: dict[str, Any] = self.record["report"]["operations"]
        return found

    def weights(self) -> dict[str, Any]:
        name = "adapter_model.safetensors" if (self.folder / "adapter_model.safetensors").exists() else None
        return load_file(self.folder / (name or "model.safetensors"))


def write(workplace: Path, name: str, **keys: Any) -> Path:
    """The YAML of a run ``name`` with these keys beside those of ``BASE``; a key that is None is left out."""
    content = BASE | {"output_dir": str(workplace / name)} | keys
    path = workplace / f"{name}.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def load(path: Path, **overrides: Any) -> Any:
    """The configuration as Axolotl validates it, with the plugins of this one alone."""
    from axolotl.cli.config import load_cfg
    from axolotl.integrations.base import PluginManager

    PluginManager.get_instance().plugins.clear()
    return load_cfg(str(path), **overrides)


def train(workplace: Path, name: str, flag: object = None, **keys: Any) -> Run:
    """Trains in this process, with the flag if it is given, and the plugin listed."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.train import do_train

    if flag is not None:
        keys |= {"use_fast_kernels": flag}
    path = write(workplace, name, plugins=[RECORDER, OURS], **keys)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(workplace)
        do_train(load(path), TrainerCliArgs())
    return read(workplace / name)


def read(folder: Path, rank: int = 0) -> Run:
    return Run(folder, json.loads((folder / f"record-{rank}.json").read_text()))


def command(workplace: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of this interpreter's environment in ``workplace``, with this repository's slothplug."""
    scripts = sysconfig.get_path("scripts")
    inherited = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    inherited.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [str(Path(scripts, words[0])) if words[0] != "python" else sys.executable, *words[1:]],
        capture_output=True, text=True, timeout=280, cwd=workplace, env=inherited | environment,
    )  # fmt: skip
