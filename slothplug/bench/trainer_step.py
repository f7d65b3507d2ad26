"""LoRA fine-tuning steps through the real HF Trainer: stock, Liger and slothplug beside each other.

Each variant and repetition runs in a process of its own, in turn, so that a drift of the machine meets all alike. The
model has the shape of a known one and random weights; the data are random tokens, every label kept.

    python -m slothplug.bench.trainer_step --output docs/benchmarks/trainer_step
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slothplug.bench.environment import versions, write

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip

VARIANTS = ("stock", "liger", "slothplug")


@dataclass(frozen=True)
class Case:
    """One configuration of a training step."""

    shape: str
    batch: int
    length: int
    checkpointing: bool
    rank: int = 16
    """LoRA rank on all linears; 0 trains every weight."""
    layers: int = 0
    """Decoder layers; 0 takes the shape's own number."""


def measure(case: Case, variant: str, steps: int, warmup: int) -> dict[str, Any]:
    """Trains ``warmup + steps`` steps in this process and returns step times (s), peak memory (bytes) and losses."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from slothplug.bench.clock import Clock

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[case.shape])
    if case.layers:
        config.num_hidden_layers = case.layers
    config.use_cache = False
    with torch.device("cuda" if on_gpu else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    if case.rank:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        if case.checkpointing:
            model.enable_input_require_grads()

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (case.batch * (steps + warmup), case.length), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    callbacks: list[TrainerCallback] = [clock]
    fast = None
    if variant == "slothplug":
        from slothplug.integrations.hf import FastKernelsCallback

        fast = FastKernelsCallback(True)
        callbacks.append(fast)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=case.batch, max_steps=steps + warmup, bf16=True,
            gradient_checkpointing=case.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
            use_liger_kernel=variant == "liger", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=not on_gpu,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return {
        "case": asdict(case),
        "variant": variant,
        "seconds": clock.times[warmup:],
        "first_step_seconds": clock.times[0],
        "peak_bytes": clock.peak_bytes,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "report": fast.report.to_dict()["operations"] if fast and fast.report else None,
    }


def run_in_process(case: Case, variant: str, steps: int, warmup: int) -> dict[str, Any]:
    """``measure`` in a process of its own; a dictionary with ``error`` where it failed."""
    job = json.dumps({"case": asdict(case), "variant": variant, "steps": steps, "warmup": warmup})
    done = subprocess.run(
        [sys.executable, "-m", "slothplug.bench.trainer_step", "--job", job],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"case": asdict(case), "variant": variant, "error": (done.stderr or done.stdout)[-2000:]}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: time and memory of each variant, and their ratios to stock in the same case."""
    lines = [
        "| shape | tokens | checkpointing | LoRA rank | variant "
        "| step, ms (min-max) | of stock | peak, GiB | of stock |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    stock = {json.dumps(r["case"]): r for r in results if r["variant"] == "stock" and "error" not in r}
    for result in results:
        case = Case(**result["case"])
        head = (
            f"| {case.shape} | {case.batch} x {case.length} | {'on' if case.checkpointing else 'off'} "
            f"| {case.rank or 'full'} | {result['variant']} "
        )
        if "error" in result:
            lines.append(head + "| failed | | | |")
            continue
        median, peak = statistics.median(result["seconds"]), result["peak_bytes"]
        base = stock.get(json.dumps(result["case"]))
        ratios = ("", "")
        if base:
            ratios = (f"{median / statistics.median(base['seconds']):.3f}", f"{peak / base['peak_bytes']:.3f}")
        spread = f"{median * 1e3:.1f} ({min(result['seconds']) * 1e3:.1f}-{max(result['seconds']) * 1e3:.1f})"
        lines.append(head + f"| {spread} | {ratios[0]} | {peak / 2**30:.2f} | {ratios[1]} |")
    return "\n".join(lines)


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama3-8b",
    batch: int = 4,
    length: int = 2048,
    rank: Annotated[int, typer.Option(help="LoRA rank on all linears; 0 trains every weight.")] = 16,
    layers: Annotated[int, typer.Option(help="Decoder layers; 0: the shape's own number.")] = 0,
    checkpointing: Annotated[str, typer.Option(help="on, off or both.")] = "both",
    variants: Annotated[str, typer.Option(help="Comma-separated: stock, liger, slothplug.")] = "stock,slothplug",
    steps: int = 8,
    warmup: int = 3,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
    job: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Times LoRA steps through HF Trainer and prints a table."""
    if job:
        given = json.loads(job)
        result = measure(Case(**given["case"]), given["variant"], given["steps"], given["warmup"])
        print("RESULT " + json.dumps(result), flush=True)
        return
    results = []
    for on in {"on": (True,), "off": (False,), "both": (True, False)}[checkpointing]:
        for variant in variants.split(","):
            result = run_in_process(Case(shape, batch, length, on, rank, layers), variant, steps, warmup)
            print(result.get("error") or table([result]).splitlines()[-1], flush=True)
            results.append(result)
    text = f"{versions()}\n\n{table(results)}\n"
    print(text)
    if output:
        write(output, "trainer_step", "A training step through HF Trainer", results, text)


if __name__ == "__main__":
    typer.run(main)
