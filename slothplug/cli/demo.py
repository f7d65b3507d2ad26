"""``slothplug demo``: the same fine-tuning run twice, stock and with the flag, and what came of it."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slothplug.cli.demo_picture import draw_curves
from slothplug.cli.demo_plan import GIB, Plan, choose_plan
from slothplug.cli.demo_text import blocks_of_tokens
from slothplug.errors import SlothplugError

SIDES = ("stock", "fast")
TITLES = {"stock": "stock HF + PEFT", "fast": "use_fast_kernels"}


@dataclass
class Run:
    """What one of the two processes measured."""

    losses: list[float]
    step_seconds: float
    seconds: float
    peak_memory: int
    gradients: dict[str, torch.Tensor]
    gradients_loss: float
    details: dict[str, Any]


def run_demo(out: Path, steps: int | None = None, cpu: bool = False) -> None:
    """Trains both sides one after the other, and prints and draws the comparison.

    Raises:
        SlothplugError: a run failed; the message ends with the last lines of its log.
    """
    console = Console()
    began = time.perf_counter()
    _check_installed()
    plan = choose_plan(steps, cpu)
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"[bold]slothplug demo[/bold] on {_machine(plan)}: {_describe(plan)}")
    with console.status("Training a tokenizer on the standard library's sources"):
        torch.save(blocks_of_tokens(plan.blocks, plan.tokens, plan.tokenizer_vocab), out / "tokens.pt")
    plan.save(out / "plan.json")

    with _progress(console) as progress:
        bars = {side: progress.add_task(TITLES[side], start=False, total=plan.steps, loss="") for side in SIDES}
        for side in SIDES:
            progress.start_task(bars[side])
            for line in _worker(out, side):
                progress.update(bars[side], completed=line["step"], loss=f"loss {line['loss']:.4f}")
    runs = {side: _load(out, side) for side in SIDES}

    picture = draw_curves(runs["stock"].losses, runs["fast"].losses, out / "loss.png")
    console.print()
    console.print(runs["fast"].details["report_text"], markup=False, highlight=False, soft_wrap=True)
    console.print()
    for table in (_curve_table(runs), _cost_table(runs, plan), _difference_table(runs, out)):
        console.print(table)
        console.print()
    if plan.device == "cpu":
        console.print(
            "Without a GPU time is not the point: PyTorch computes both sides here. What to see is that the numbers "
            "are stock's, and what was fused."
        )
    console.print(
        f"Curves: {picture}. All figures: {out}. {time.perf_counter() - began:.0f} s in all.", highlight=False
    )


def _check_installed() -> None:
    missing = [name for name in ("accelerate", "peft", "matplotlib", "tokenizers") if find_spec(name) is None]
    if missing:
        raise SlothplugError(f"The demo needs {', '.join(missing)}. Install with: pip install 'slothplug[demo]'")


def _machine(plan: Plan) -> str:
    return torch.cuda.get_device_name() if plan.device == "cuda" else f"the CPU ({torch.get_num_threads()} threads)"


def _describe(plan: Plan) -> str:
    model = plan.model
    return (
        f"a Llama of {model['num_hidden_layers']} layers x {model['hidden_size']}, vocabulary {plan.model_vocab}, "
        f"random {plan.dtype} weights, LoRA r{plan.rank} on every linear layer; "
        f"{plan.steps} steps of {plan.rows} x {plan.tokens} tokens"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def _worker(out: Path, side: str) -> Iterator[dict[str, Any]]:
    """Runs one side in its own process; yields the lines it prints, one a step."""
    log = out / f"{side}.log"
    command = [sys.executable, "-m", "slothplug.cli.demo_worker", str(out), side]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SlothplugError(f"The {side} run ended with status {process.returncode}. The end of {log}:\n{tail}")


def _load(out: Path, side: str) -> Run:
    details = json.loads((out / f"{side}.json").read_text(encoding="utf-8"))
    loss, gradients = torch.load(out / f"{side}-gradients.pt")["gradients"]
    done_at = details["done_at"]
    return Run(
        losses=details["losses"],
        step_seconds=statistics.median(later - earlier for earlier, later in itertools.pairwise(done_at)),
        seconds=details["seconds"],
        peak_memory=details["peak_memory"],
        gradients=gradients,
        gradients_loss=loss,
        details=details,
    )


def _table(title: str, *columns: str) -> Table:
    """A table of figures; the first column says what they are of."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    return table


def _curve_table(runs: dict[str, Run]) -> Table:
    """About ten points of both curves."""
    table = _table("training loss", "step", TITLES["stock"], TITLES["fast"], "difference")
    stock, fast = runs["stock"].losses, runs["fast"].losses
    last = len(stock) - 1
    for index in sorted({round(last * part / 9) for part in range(10)}):
        table.add_row(
            str(index + 1), f"{stock[index]:.5f}", f"{fast[index]:.5f}", f"{abs(fast[index] - stock[index]):.1e}"
        )
    return table


def _cost_table(runs: dict[str, Run], plan: Plan) -> Table:
    stock, fast = runs["stock"], runs["fast"]
    memory = "peak GPU memory" if plan.device == "cuda" else "peak process memory"
    table = _table("time and memory", "", TITLES["stock"], TITLES["fast"], "ratio")
    rows: list[tuple[str, Callable[[float], str], float, float]] = [
        ("median step", _seconds, stock.step_seconds, fast.step_seconds),
        ("training", _seconds, stock.seconds, fast.seconds),
        (memory, _gib, stock.peak_memory, fast.peak_memory),
    ]
    for name, show, theirs, ours in rows:
        table.add_row(name, show(theirs), show(ours), f"{ours / theirs:.2f}")
    return table


def _difference_table(runs: dict[str, Run], out: Path) -> Table:
    """How far the two runs are apart, beside how far stock is from stock with its other attention implementation."""
    stock, fast = runs["stock"], runs["fast"]
    eager_loss, eager = torch.load(out / "stock-gradients.pt")["yardstick"]
    losses = max(abs(ours - theirs) for ours, theirs in zip(fast.losses, stock.losses, strict=True))
    table = _table("largest differences from stock", "", TITLES["fast"], "stock, eager attention")
    table.add_row("training loss, all steps", f"{losses:.1e}", "-")
    table.add_row(
        "loss, one batch",
        f"{abs(fast.gradients_loss - stock.gradients_loss):.1e}",
        f"{abs(eager_loss - stock.gradients_loss):.1e}",
    )
    table.add_row(
        "gradients, one batch",
        f"{largest_difference(fast.gradients, stock.gradients):.1e}",
        f"{largest_difference(eager, stock.gradients):.1e}",
    )
    table.caption = (
        f"Gradients: {len(stock.gradients)} adapter tensors at equal weights, B randomised; each\n"
        f"difference relative to the norm of its tensor."
    )
    return table


def largest_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest ``|got - expected| / |expected|`` over the tensors, in Frobenius norms.

    Raises:
        SlothplugError: a gradient is there on one side only.
    """
    if got.keys() != expected.keys():
        raise SlothplugError(f"Gradients of one side only: {sorted(got.keys() ^ expected.keys())}")
    return max(
        ((got[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-300)).item()
        for name, value in expected.items()
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB"
