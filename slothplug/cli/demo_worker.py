"""One run of the demo in a process of its own: ``python -m slothplug.cli.demo_worker FOLDER stock|fast``.

Reads the plan and the tokens that the parent left in the folder, writes ``<side>.json`` and ``<side>-gradients.pt``
there, and prints one JSON line a step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

from slothplug.cli.demo_plan import Plan
from slothplug.integrations.hf import FastKernelsCallback
from slothplug.integrations.hf.throughput import peak_memory


class RecordingTrainer(Trainer):
    """The stock trainer, which also writes down each step's loss (unrounded) and when the step was done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.done_at: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())  # also waits for the GPU, so that the times are the steps' own
        self.done_at.append(time.perf_counter())
        print(json.dumps({"step": len(self.losses), "loss": self.losses[-1]}), flush=True)
        return loss


def build(plan: Plan) -> nn.Module:
    """The model of both runs: frozen random weights and LoRA adapters on every linear layer."""
    set_seed(plan.seed)
    with torch.device(plan.device):  # drawing a billion weights takes a GPU a moment and a CPU half a minute
        model = LlamaForCausalLM(LlamaConfig(vocab_size=plan.model_vocab, use_cache=False, **plan.model))
    model.to(getattr(torch, plan.dtype))
    return get_peft_model(model, LoraConfig(r=plan.rank, lora_alpha=2 * plan.rank, target_modules="all-linear"))


def arguments(plan: Plan, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.rows,
        learning_rate=plan.learning_rate,
        warmup_steps=plan.warmup_steps,
        bf16=plan.dtype == "bfloat16",
        use_cpu=plan.device == "cpu",
        seed=plan.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=plan.steps,
    )


def gradients(trainer: Trainer, batch: torch.Tensor, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of one step before training, with LoRA's B randomised.

    B starts at zero, and with it the gradient of every A: a comparison there would see half of the adapters. Afterwards
    the weights and the RNG state are what they were.
    """
    model: nn.Module = trainer.model
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in trainable.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
        inputs = trainer._prepare_inputs({"input_ids": batch, "labels": batch})
        model.train()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
    found = {name: parameter.grad.detach().cpu() for name, parameter in trainable.items() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(kept[name])
    return loss.item(), found


def yardstick(trainer: Trainer, batch: torch.Tensor, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The same step of the same model with its attention in eager PyTorch: how far stock is from stock."""
    config = trainer.model.config
    before = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        return gradients(trainer, batch, seed)
    finally:
        config._attn_implementation = before


def train(folder: Path, side: str) -> None:
    plan = Plan.load(folder / "plan.json")
    tokens = torch.load(folder / "tokens.pt")
    fast_kernels = FastKernelsCallback(side == "fast")
    trainer = RecordingTrainer(
        model=build(plan),
        args=arguments(plan, folder),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens[plan.rows :]],  # the model shifts labels
        callbacks=[fast_kernels],
    )
    trainer.remove_callback(PrinterCallback)

    held_out = tokens[:1]  # one row, so that the peak of memory is training's
    measured = {"gradients": gradients(trainer, held_out, plan.seed)}
    if side == "stock":
        measured["yardstick"] = yardstick(trainer, held_out, plan.seed)
    torch.save(measured, folder / f"{side}-gradients.pt")

    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.train()
    result: dict[str, Any] = {
        "losses": trainer.losses,
        "seconds": time.perf_counter() - began,
        "done_at": [moment - began for moment in trainer.done_at],
        "peak_memory": peak_memory(torch.device(plan.device)),
    }
    if fast_kernels.report is not None:
        result |= {"report": fast_kernels.report.to_dict(), "report_text": str(fast_kernels.report)}
    (folder / f"{side}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
