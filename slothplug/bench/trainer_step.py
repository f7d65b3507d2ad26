"""LoRA fine-tuning steps through the real HF Trainer: stock, Liger and slothplug beside each other.

Each variant and repetition runs in a process of its own, in turn, so that a drift of the machine meets all alike. The
model has the shape of a known one and random weights; the data are random tokens, every label kept.

    python -m slothplug.bench.trainer_step --output docs/benchmarks/trainer_step
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from slothplug.bench.environment import in_own_process, show, versions
from slothplug.bench.steps import SHAPES, Case, random_model, table

VARIANTS = ("stock", "liger", "slothplug")


def measure(case: Case, variant: str, steps: int, warmup: int) -> dict[str, Any]:
    """Trains ``warmup + steps`` steps in this process and returns step times (s), peak memory (bytes) and losses."""
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from slothplug.bench.clock import Clock

    model = random_model(case.model)
    if case.rank:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        if case.checkpointing:
            model.enable_input_require_grads()

    generator = torch.Generator().manual_seed(1)
    rows = (case.batch * (steps + warmup), case.length)
    tokens = torch.randint(0, case.model["vocab_size"], rows, generator=generator)
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
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
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
) -> None:
    """Times LoRA steps through HF Trainer and prints a table."""
    results = []
    for on in {"on": (True,), "off": (False,), "both": (True, False)}[checkpointing]:
        for variant in variants.split(","):
            case = Case(shape, "lora", batch, length, on, rank, layers)
            try:
                result = in_own_process(measure, case, variant, steps, warmup)
            except Exception as error:  # out of memory, say; the table says that it failed
                result = {"case": asdict(case), "variant": variant, "error": f"{type(error).__name__}: {error}"}
            print(result.get("error") or table([result]).splitlines()[-1], flush=True)
            results.append(result)
    text = f"{versions()}\n\n{table(results)}\n"
    show(output, "trainer_step", "A training step through HF Trainer", results, text)


if __name__ == "__main__":
    typer.run(main)
