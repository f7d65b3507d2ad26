"""For every causal LM type of transformers: what slothplug finds and serves, and whether the numbers stay.

    python -m tests.architectures.survey --output docs/architectures          # all types
    python -m tests.architectures.survey llama qwen3 --output /tmp/two        # some

Each type runs in a process of its own: a small random model, one training step stock and one patched, both with full
parameters and with LoRA.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tests.architectures.build import causal_lm_types
from tests.architectures.one import survey
from tests.architectures.processes import rows
from tests.architectures.table import markdown, table_row, totals


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Model types; all by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
    workers: Annotated[int, typer.Option(help="Processes at a time, each with one thread.")] = 2,
    backend: Annotated[str, typer.Option(help="Kernel backend: auto, torch or triton.")] = "torch",
) -> None:
    """Surveys model types and writes the table."""
    found = []
    for row in rows(types or causal_lm_types(), workers, partial(survey, backend=backend)):
        print(table_row(row), flush=True)
        found.append(row)
    print(json.dumps(totals(found), indent=1))
    if output:
        versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "torch"))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown(found, versions))


if __name__ == "__main__":
    typer.run(main)
