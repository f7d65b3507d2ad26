"""A head with a LoRA adapter, and what entropy and argmax of every row cost: forward and backward, bfloat16, rank 16.

    python -m slothplug.bench.adapted_head --output docs/benchmarks/adapted_head

``stock`` is what PEFT and HF compute: ``F.linear(x, W) + scaling * F.linear(F.linear(x, A), B)``, then the loss of
float32 logits. Nobody else fuses such a head; ``no adapter`` is slothplug's own for comparison. ``with entropy and
argmax`` adds, to stock, the metrics as TRL's SFTTrainer computes them from logits; to slothplug, the row kernel that
writes them. All take turns in one process. ``extra`` is the peak of GPU memory less inputs and gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer

from slothplug.bench.environment import markdown, show, spread, versions
from slothplug.bench.head import SHAPES, Case, extra_bytes, inputs, milliseconds, step_of
from slothplug.kernels.cross_entropy import EpilogueStep, RowStatistics
from slothplug.kernels.linear_cross_entropy import LowRank, linear_cross_entropy

RANK = 16
SCALING = 1.0


class Operands(NamedTuple):
    """hidden [N, H], weight [V, H], the adapter's a [r, H] and b [V, r], labels [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    labels: torch.Tensor


Loss = Callable[[Operands], torch.Tensor]
"""The mean over all rows."""


def stock(operands: Operands, *, adapted: bool, metrics: bool) -> torch.Tensor:
    hidden, weight, a, b, labels = operands
    logits = F.linear(hidden, weight)
    if adapted:
        logits = logits + F.linear(F.linear(hidden, a), b) * SCALING
    if metrics:
        with torch.no_grad():
            # 128 rows at a time, as trl.trainer.utils.entropy_from_logits does.
            for rows in logits.split(128):
                log_p = F.log_softmax(rows, -1)
                torch.sum(log_p.exp() * log_p, -1)
            logits.argmax(-1)
    return F.cross_entropy(logits.float(), labels)


def fused(operands: Operands, *, adapted: bool, metrics: bool) -> torch.Tensor:
    hidden, weight, a, b, labels = operands
    cast: list[EpilogueStep] = [("cast", torch.float32)]
    low_rank = LowRank(F.linear(hidden, a), b, SCALING) if adapted else None
    written = RowStatistics.empty(labels.numel(), labels.device) if metrics else None
    return linear_cross_entropy(
        hidden, weight, labels, epilogue=cast, low_rank=low_rank, statistics=written, backend="triton"
    )


def _ways() -> dict[str, Loss]:
    ways: dict[str, Loss] = {}
    for adapted in (False, True):
        for metrics in (False, True):
            what = ("LoRA on the head" if adapted else "no adapter") + (", with entropy and argmax" if metrics else "")
            ways[f"stock, {what}"] = partial(stock, adapted=adapted, metrics=metrics)
            ways[f"slothplug, {what}"] = partial(fused, adapted=adapted, metrics=metrics)
    return ways


WAYS: Mapping[str, Loss] = _ways()


def measure(shape: tuple[int, int, int], repetitions: int) -> list[dict[str, Any]]:
    """A row for each way."""
    case = Case(*shape, trainable=False, ignored=0.0)
    hidden, weight, labels = inputs(case)
    a = torch.randn(RANK, case.hidden, device="cuda").mul_(case.hidden**-0.5).bfloat16().requires_grad_()
    b = torch.randn(case.vocabulary, RANK, device="cuda").mul_(0.1).bfloat16().requires_grad_()
    operands = Operands(hidden, weight, a, b, labels)

    steps = [step_of(partial(loss, operands), operands) for loss in WAYS.values()]
    extra = [extra_bytes(step, operands) for step in steps]
    times = milliseconds(steps, repetitions)
    return [
        {"shape": shape, "way": way, "ms": ms, "extra_bytes": bytes_}
        for way, ms, bytes_ in zip(WAYS, times, extra, strict=True)
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; times beside those of stock in the same way and those of slothplug with neither."""
    columns = (
        "tokens x hidden x vocabulary", "way", "ms (min-max)", "of stock", "of slothplug, no adapter", "extra, GB",
    )  # fmt: skip
    lines = []
    median = {(tuple(row["shape"]), row["way"]): statistics.median(row["ms"]) for row in rows}
    for row in rows:
        shape, way = tuple(row["shape"]), row["way"]
        name, rest = way.split(",", 1)
        own = median[shape, way]
        plain = f"{own / median[shape, 'slothplug, no adapter']:.3f}" if name == "slothplug" else ""
        of_stock, extra = f"{own / median[shape, f'stock,{rest}']:.3f}", f"{row['extra_bytes'] / 1e9:.2f}"
        lines.append([" x ".join(map(str, shape)), way, spread(row["ms"]), of_stock, plain, extra])
    return markdown(columns, lines)


def main(
    repetitions: int = 9,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
) -> None:
    """Times a head with an adapter and with statistics, and prints a table."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows += measure(shape, repetitions)
        torch.cuda.empty_cache()
    text = f"{versions()}\n\n{table(rows)}\n"
    show(output, "adapted_head", "A head with an adapter or statistics", rows, text)


if __name__ == "__main__":
    typer.run(main)
