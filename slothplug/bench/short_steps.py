"""Short LoRA steps, whose time is the host's: stock, Liger, Unsloth and slothplug beside each other.

Stock and slothplug, whose patch is undone after each row, run in one process, Liger and Unsloth each in another, in
turn. The model has the shape of a known one and random weights; all load it from one folder, since Unsloth can do
nothing else. The data are random tokens, every label kept.

    python -m slothplug.bench.short_steps --output docs/benchmarks/short_steps
    python -m slothplug.bench.short_steps --setting nf4 --rows 1x512
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from slothplug.bench.environment import in_own_process, markdown, show, spread, versions
from slothplug.bench.steps import SHAPES, random_model

VARIANTS: Mapping[str, Any] = {
    "stock": None, "liger": None, "unsloth": None, "slothplug": True, "slothplug-eager": {"graphs": "off"},
}  # fmt: skip
"""The flag of each variant."""

PEERS = ("liger", "unsloth")
"""Variants that change transformers for the whole process."""

SETTINGS = ("plain", "checkpointing", "nf4")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUP = 6


def measure(
    folder: str, variants: Sequence[str], setting: str, rows: Sequence[str], steps: int
) -> list[dict[str, Any]]:
    """Times each row in this process.

    Args:
        folder: of the model and its tokenizer.
        variants: some of ``VARIANTS``; a peer alone.
        setting: one of ``SETTINGS``.
        rows: ``BATCHxLENGTH``: steps of forward and backward; ``COUNTxlengths``: so many of one sequence of 64 to 512
            tokens, the recording of graphs included; ``trainer`` and ``trainer-unfiltered``: 1 x 512 tokens through
            HF Trainer, with optimizer and clipping, in the second with ``logging_nan_inf_filter=False``.
        steps: that are timed in each row; a fifth of them above 4096 tokens.
    """
    import torch

    model = _load(folder, variants[0], setting)
    on_gpu = torch.cuda.is_available()
    loaded = torch.cuda.memory_allocated() if on_gpu else 0
    results = []
    for variant, row in itertools.product(variants, rows):
        report = None
        if VARIANTS[variant]:
            import slothplug

            report = slothplug.patch(model, VARIANTS[variant])
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        result: dict[str, Any] = {"variant": variant, "setting": setting, "row": row}
        try:
            result |= _measured(model, row, steps)
        except torch.OutOfMemoryError:
            result["error"] = "out of memory"
            model.zero_grad(set_to_none=True)
        if on_gpu:
            result["bytes_above_model"] = torch.cuda.max_memory_allocated() - loaded
            result["bytes_reserved"] = torch.cuda.memory_reserved()
        if report is not None:
            result["graphs"] = [line.strip() for line in str(report).splitlines() if "graphs:" in line]
            report.undo()
        print(json.dumps(result), flush=True)
        results.append(result)
    return results


def _load(folder: str, variant: str, setting: str) -> Any:
    """The model with adapters, in training mode."""
    if variant == "unsloth":
        return _load_by_unsloth(folder, setting)
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    if variant == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel(AutoConfig.from_pretrained(folder).model_type)
    options: dict[str, Any] = {}
    if setting == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="sdpa", device_map={"": _device()}, **options
    )
    if setting == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def _load_by_unsloth(folder: str, setting: str) -> Any:
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        folder, max_seq_length=32768, dtype=torch.bfloat16, load_in_4bit=setting == "nf4"
    )
    checkpointing = "unsloth" if setting == "checkpointing" else False
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, lora_dropout=0, bias="none", target_modules=TARGETS,
        use_gradient_checkpointing=checkpointing,
    ).train()  # fmt: skip


def _measured(model: Any, row: str, steps: int) -> dict[str, Any]:
    if row.endswith("xlengths"):
        return _lengths(model, int(row.removesuffix("xlengths")))
    if row.startswith("trainer"):
        return _trainer(model, steps, nan_filter=row == "trainer")
    batch, length = map(int, row.split("x"))
    tokens = _tokens(model, batch, length)
    steps = steps if tokens.numel() <= 4096 else max(1, steps // 5)
    for _ in range(WARMUP):
        _step(model, tokens)
    losses, host, seconds = zip(*(_timed(partial(_step, model, tokens)) for _ in range(steps)), strict=True)
    return {"seconds": seconds, "host_seconds": host, "loss": float(losses[-1])}


def _lengths(model: Any, steps: int) -> dict[str, Any]:
    draw = random.Random(0)
    batches = [_tokens(model, 1, draw.randint(64, 512)) for _ in range(steps)]

    def run() -> list[Any]:
        return [_step(model, tokens) for tokens in batches]

    losses, _, total = _timed(run)
    return {"seconds": [total / steps], "loss": statistics.mean(map(float, losses))}


def _trainer(model: Any, steps: int, nan_filter: bool) -> dict[str, Any]:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Clock(_clock()):  # type: ignore[misc]
        """Only both ends wait for the device: a step of the host may run ahead."""

        seconds: float

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARMUP:
                _synchronize()
                self._start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARMUP + steps:
                _synchronize()
                self.seconds = (time.perf_counter() - self._start) / steps

    clock = Clock()
    data = [{"input_ids": tokens, "labels": tokens} for tokens in _tokens(model, 64, 512).cpu()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=WARMUP + steps, bf16=True, report_to=[],
            save_strategy="no", logging_steps=10, disable_tqdm=True, logging_nan_inf_filter=nan_filter,
            use_cpu=_device() == "cpu",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.zero_grad(set_to_none=True)
    return {"seconds": [clock.seconds], "loss": trainer.state.log_history[-1]["train_loss"]}


def _clock() -> type:
    from transformers import TrainerCallback

    return TrainerCallback


def _tokens(model: Any, batch: int, length: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(length)
    return torch.randint(4, min(1000, model.config.vocab_size), (batch, length), generator=generator).to(_device())


def _step(model: Any, tokens: Any) -> Any:
    """Forward and backward as the Trainer runs them with ``bf16``; the loss."""
    import torch

    with torch.autocast(_device(), dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def _timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """What ``function`` returns, the seconds until then, and the seconds until the device is done."""
    _synchronize()
    start = time.perf_counter()
    result = function()
    launched = time.perf_counter()
    _synchronize()
    return result, launched - start, time.perf_counter() - start


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def save_model(shape: str, folder: str) -> None:
    """Writes a random model of this shape, and a tokenizer of a few words, which Unsloth insists on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    random_model(SHAPES[shape]).save_pretrained(folder)
    words = {word: i for i, word in enumerate(("<s>", "</s>", "<pad>", "<unk>"))}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), bos_token="<s>", eos_token="</s>",
        pad_token="<pad>", unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: time and memory of each row, beside those of Unsloth, or of stock where that did not run."""
    columns = ("setting", "row", "variant", "step, ms (min-max)", "of", "time", "GiB above the model", "memory", "loss")
    return markdown(columns, (_line(result, results) for result in results))


def _line(result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[str]:
    what = [result["setting"], result["row"], result["variant"]]
    if "error" in result:
        return [*what, f"failed: {result['error']}", *[""] * 5]
    same = [r for r in results if (r["setting"], r["row"]) == (result["setting"], result["row"]) and "error" not in r]
    base = next((r for name in ("unsloth", "stock") for r in same if r["variant"] == name), None)
    of, slower, larger = "", "", ""
    above = result.get("bytes_above_model", 0)
    if base:
        of = base["variant"]
        slower = f"{statistics.median(result['seconds']) / statistics.median(base['seconds']):.3f}"
        larger = f"{above / base['bytes_above_model']:.3f}" if base.get("bytes_above_model") else ""
    step = spread([second * 1e3 for second in result["seconds"]], digits=1)
    return [*what, step, of, slower, f"{above / 2**30:.3f}", larger, f"{result['loss']:.4f}"]


def _processes(variants: Sequence[str]) -> list[list[str]]:
    """The variants by the process that measures them."""
    ours = [variant for variant in variants if variant not in PEERS]
    return [[variant] for variant in variants if variant in PEERS] + ([ours] if ours else [])


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama3-8b",
    setting: Annotated[str, typer.Option(help=f"One of {', '.join(SETTINGS)}.")] = "plain",
    rows: Annotated[
        str, typer.Option(help="Separated by ';'.")
    ] = "1x512;1x2048;200xlengths;trainer;trainer-unfiltered",
    variants: Annotated[str, typer.Option(help="Separated by ';'.")] = ";".join(VARIANTS),
    steps: int = 25,
    folder: Annotated[Path | None, typer.Option(help="Keeps the model here, or finds it here.")] = None,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
) -> None:
    """Times short LoRA steps and prints a table."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        path = str(folder or temporary)
        if not (Path(path) / "config.json").exists():
            in_own_process(save_model, shape, path)
        for together in _processes(variants.split(";")):
            try:
                results += in_own_process(measure, path, together, setting, rows.split(";"), steps)
            except Exception as error:  # a peer that is not installed, say; the table says so
                failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                results += [
                    {"variant": variant, "setting": setting, "row": row, "error": failed}
                    for variant, row in itertools.product(together, rows.split(";"))
                ]
    text = f"{shape}, LoRA r16; {versions()}\n\n{table(results)}\n"
    show(output, "short_steps", "Short training steps", results, text)


if __name__ == "__main__":
    typer.run(main)
