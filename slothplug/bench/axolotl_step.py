"""LoRA and QLoRA steps of the real `axolotl train`: stock, with Axolotl's own kernels and with slothplug.

``stock`` has Axolotl's LoRA kernels off, ``axolotl`` has them on, and Liger's for the rest (rope, norms, MLPs, head and
loss), ``slothplug`` is stock with ``use_fast_kernels: true``. Each run is the command itself in a process of its own,
on the same weights, adapters and data, with random tokens, no padding, every label kept.

    python -m slothplug.bench.axolotl_step --output docs/benchmarks/axolotl_step
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from slothplug.bench.environment import in_own_process, versions, without
from slothplug.bench.steps import SHAPES, Case, random_model, table
from slothplug.integrations.axolotl.kernels import LORA_KERNELS

LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
CLOCK = "slothplug.bench.axolotl_clock.ClockPlugin"

MEASURED = "measured.json"
"""What a run leaves in its output folder."""

VARIANTS: Mapping[str, dict[str, Any]] = {
    "stock": {"plugins": [CLOCK]} | dict.fromkeys(LORA_KERNELS, False),
    "axolotl": {"plugins": [LIGER_PLUGIN, CLOCK]} | dict.fromkeys(LORA_KERNELS + LIGER, True),
    "slothplug": {"plugins": ["slothplug.integrations.axolotl.SlothplugPlugin", CLOCK], "use_fast_kernels": True},
}  # fmt: skip


def configuration(case: Case, variant: str, steps: int, folder: Path) -> dict[str, Any]:
    """What a user would write into the YAML; the files are in ``folder``."""
    import torch

    return {
        "base_model": str(_model_path(case, folder)), "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer", "attn_implementation": "sdpa", "bf16": torch.cuda.is_available(),
        "datasets": [{"path": str(_rows_path(case, steps, folder)), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"), "dataset_num_proc": 1, "val_set_size": 0,
        "sequence_len": case.length, "sample_packing": False, "pad_to_sequence_len": False,
        "adapter": case.adapter, "load_in_4bit": case.adapter == "qlora", "lora_r": case.rank, "lora_alpha": case.rank,
        "lora_dropout": 0.0, "lora_target_linear": True, "gradient_checkpointing": case.checkpointing,
        "micro_batch_size": case.batch, "gradient_accumulation_steps": 1, "max_steps": steps, "num_epochs": 1,
        "optimizer": "adamw_torch_fused", "learning_rate": 2e-4, "lr_scheduler": "constant", "logging_steps": 1,
        "save_strategy": "no", "output_dir": str(folder / "output"), "seed": 3,
    } | VARIANTS[variant]  # fmt: skip


def prepare(case: Case, steps: int, folder: Path) -> None:
    """Writes model and rows into ``folder`` where they are not there yet."""
    model, rows = _model_path(case, folder), _rows_path(case, steps, folder)
    if not model.exists():
        unfinished = model.with_suffix(".unfinished")
        in_own_process(write_model, unfinished, case.model)
        unfinished.rename(model)
    if not rows.exists():
        write_rows(rows, case.batch * steps, case.length, case.model["vocab_size"])


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """A causal LM of this configuration, as ``random_model`` draws it, and its tokenizer.

    On a disk and not drawn anew in each run, since Axolotl quantizes only weights that it loads, and so that all runs
    have the same. The tokenizer knows nothing but the special tokens.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = random_model({**shape, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    model.save_pretrained(folder, max_shard_size="4GB")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = Tokenizer(models.WordLevel({token: at for at, token in enumerate(special.values())}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write_rows(path: Path, rows: int, length: int, vocab_size: int) -> None:
    """``rows`` rows of ``length`` random tokens, tokenized already, with every label kept."""
    import torch

    tokens = torch.randint(4, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * length, "labels": row}) for row in tokens]
    path.write_text("\n".join(lines) + "\n")


def _model_path(case: Case, folder: Path) -> Path:
    return folder / f"{case.shape}-{case.model['num_hidden_layers']}".replace(".", "-")


def _rows_path(case: Case, steps: int, folder: Path) -> Path:
    return folder / f"{case.shape}-{case.batch * steps}x{case.length}.jsonl"


def measure(case: Case, variant: str, steps: int, warmup: int, folder: Path) -> dict[str, Any]:
    """Runs ``axolotl train`` and returns step times (s), peak memory (bytes) and losses, or ``error``."""
    prepare(case, steps + warmup, folder)
    path = folder / "config.yml"
    path.write_text(json.dumps(configuration(case, variant, steps + warmup, folder), indent=1))  # JSON is YAML
    found = folder / "output" / MEASURED
    found.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.main", "train", str(path), "--launcher", "python"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    result: dict[str, Any] = {"case": asdict(case), "variant": variant}
    if done.returncode or not found.exists():
        return result | {"error": done.stdout[-4000:]}
    measured = json.loads(found.read_text())
    first = measured["seconds"][0]
    return result | measured | {"first_step_seconds": first, "seconds": measured["seconds"][warmup:]}


def write(results: Sequence[Mapping[str, Any]], output: Path) -> None:
    """OUTPUT.json and OUTPUT.md. What an earlier call left there stays, but for the runs that were repeated."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_suffix(".json")
    earlier = json.loads(path.read_text()) if path.exists() else []
    repeated = [(result["case"], result["variant"]) for result in results]
    kept = [result for result in earlier if (result["case"], result["variant"]) not in repeated]
    together = [*kept, *results]
    path.write_text(json.dumps(together, indent=1) + "\n")
    installed = "\n".join(dict.fromkeys(result["versions"] for result in together))
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(result["command"] for result in together))
    output.with_suffix(".md").write_text(
        f"# A training step of `axolotl train`\n\n{installed}\n\n{commands}\n\n{table(together)}\n"
    )


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama3-8b",
    batch: int = 4,
    length: int = 2048,
    rank: Annotated[int, typer.Option(help="LoRA rank on all linears.")] = 16,
    layers: Annotated[int, typer.Option(help="Decoder layers; 0: the shape's own number.")] = 0,
    adapter: Annotated[str, typer.Option(help="Comma-separated: lora, qlora.")] = "lora",
    checkpointing: Annotated[str, typer.Option(help="on, off or both.")] = "both",
    variants: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(VARIANTS)}.")] = ",".join(VARIANTS),
    steps: int = 8,
    warmup: int = 3,
    folder: Annotated[Path | None, typer.Option(help="Keeps weights and rows here for the next call.")] = None,
    output: Annotated[Path | None, typer.Option(help="Adds to OUTPUT.json and OUTPUT.md after each run.")] = None,
) -> None:
    """Times LoRA steps of `axolotl train` and prints a table."""
    arguments = without(without(sys.argv[1:], "--output"), "--folder")
    command = f"python -m slothplug.bench.axolotl_step {shlex.join(arguments)}"
    made_by = {"command": command, "versions": versions()}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        files = (folder or Path(temporary)).absolute()
        files.mkdir(parents=True, exist_ok=True)
        for chosen in adapter.split(","):
            for on in {"on": (True,), "off": (False,), "both": (True, False)}[checkpointing]:
                for variant in variants.split(","):
                    case = Case(shape, chosen, batch, length, on, rank, layers)
                    results.append(measure(case, variant, steps, warmup, files) | made_by)
                    print(results[-1].get("error") or table(results).splitlines()[-1], flush=True)
                    if output:
                        write(results, output)
    print(f"{versions()}\n\n{table(results)}\n")


if __name__ == "__main__":
    typer.run(main)
