"""For every causal LM type of transformers: which layers are recorded as CUDA graphs, and whether the steps stay.

    python -m tests.architectures.graphs --output docs/benchmarks/graphs_architectures     # all types
    python -m tests.architectures.graphs llama qwen3                                       # some

Each type runs in a process of its own: a small random model with LoRA adapters takes five training steps, with and
without graphs. The steps are equal if loss and every gradient have the same bits. Without a GPU the double of the
tests takes the recorder's place.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import slothplug
from slothplug.graphs import state
from slothplug.patching.served import STATE, Served
from tests.architectures.build import causal_lm_types, tiny_model
from tests.architectures.one import brief, with_adapters
from tests.architectures.processes import rows
from tests.architectures.step import IDS, LABELS, Step, train_step
from tests.graphs.replaying import RunsAgain

STEPS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def survey(model_type: str) -> dict[str, Any]:
    """One row of the table, as plain data."""
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        state.make_recorder = RunsAgain  # type: ignore[assignment, misc]
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    try:
        eager = with_adapters(tiny_model(model_type), model_type).to(DEVICE)
        graphed = copy.deepcopy(eager)  # before a step, in which some models keep tensors that cannot be copied
        _step(eager)
    except Exception as error:
        return {"type": model_type, "not_run": brief(error)}
    slothplug.patch(eager, {"graphs": "off"})
    slothplug.patch(graphed, {"graphs": "auto"})
    repeatable = _same(_step(eager), _step(eager))
    try:
        equal = [_same(_step(graphed), _step(eager)) for _ in range(STEPS)]
    except Exception as error:
        return {
            "type": model_type,
            "error": brief(error),
            "repeatable": repeatable,
            "equal": False,
            **_recorded(graphed),
        }
    return {"type": model_type, "repeatable": repeatable, "equal": all(equal), **_recorded(graphed)}


def _step(model: nn.Module) -> Step:
    return train_step(model, input_ids=IDS.to(DEVICE), labels=LABELS.to(DEVICE))


def _same(one: Step, other: Step) -> bool:
    return (
        torch.equal(one.loss, other.loss)
        and one.gradients.keys() == other.gradients.keys()
        and all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
    )


def _recorded(model: nn.Module) -> dict[str, Any]:
    """How many layers there are, how many have recordings, and why calls ran eagerly."""
    served = [s for part in model.modules() if isinstance(s := part.__dict__.get(STATE), Served) and s.op == "graphs"]
    if not served:
        return {"layers": 0, "recorded": 0, "reasons": {}}
    shared = served[0].shared
    names = {key[0][0] for session in shared.sessions.values() for key in session.captured}
    return {"layers": len(served), "recorded": len(names), "reasons": dict(shared.reasons)}


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The table, and how many types are recorded."""
    ran = [row for row in found if "not_run" not in row]
    whole = sum(row.get("recorded", 0) == row.get("layers", 0) > 0 for row in ran)
    some = sum(0 < row.get("recorded", 0) < row["layers"] for row in ran if "layers" in row)
    differ = [row["type"] for row in ran if not row["equal"] and row.get("repeatable", True)]
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU, with the double of the tests"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    lines = [
        "# Layers recorded as CUDA graphs, by model type",
        "",
        f"{where}; {packages}. Made by `python -m tests.architectures.graphs`.",
        "",
        f"{len(ran)} types ran. Every layer is recorded in {whole}, some in {some}. "
        f"Steps that differ in a bit: {', '.join(differ) or 'none'}.",
        "",
        "| type | layers | recorded | equal | why calls ran eagerly |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found:
        if "not_run" in row:
            lines.append(f"| {row['type']} | | | | not run: {_cell(row['not_run'])} |")
            continue
        equal = row.get("error") or (
            "yes" if row["equal"] else "no" if row["repeatable"] else "stock is not repeatable"
        )
        reasons = [r for r in row.get("reasons", {}) if "had not recurred" not in r]
        lines.append(
            f"| {row['type']} | {row.get('layers', '')} | {row.get('recorded', '')} | {_cell(equal)} "
            f"| {_cell('; '.join(reasons))} |"
        )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Model types; all by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md.")] = None,
    workers: Annotated[int, typer.Option(help="Processes at a time, each with one thread.")] = 2,
) -> None:
    """Surveys model types and writes the table."""
    found = []
    for row in rows(types or causal_lm_types(), workers, survey):
        if "not_built" in row:
            row = {"type": row["type"], "not_run": row["not_built"]}
        print(json.dumps(row), flush=True)
        found.append(row)
    print(Counter(row.get("equal") for row in found))
    if output:
        output.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    typer.run(main)
