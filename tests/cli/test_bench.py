"""Benchmarks need a GPU to run; what they import and replace is there without one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

import slothplug.bench
from slothplug.bench import label_count
from slothplug.ops.head import label_count as counts
from tests.patching.heads import IDS, make, patched

PROGRAMS = sorted(
    path.stem for path in Path(slothplug.bench.__path__[0]).glob("*.py") if "typer.run(main)" in path.read_text()
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name: str) -> None:
    program: Any = importlib.import_module(f"slothplug.bench.{name}")
    app = typer.Typer()
    app.command()(program.main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("way", "rows", "waits"),
    [("not counted", 48, 0), ("counted at the call", 16, 0), ("counted at the loss", 16, 1)],
)
def test_the_ways_to_count_labels_are_what_they_are_called(way: str, rows: int, waits: int) -> None:
    model = make()
    patched(model)
    seen: list[int] = []
    served = model.lm_head._slothplug
    loss = served.kernel

    def note(hidden: torch.Tensor, *args: Any, max_valid: int | None = None, **options: Any) -> torch.Tensor:
        seen.append(hidden.shape[0] if max_valid is None else max_valid)
        return loss(hidden, *args, max_valid=max_valid, **options)

    served.kernel = note
    with label_count.WAYS[way](), mock.patch.object(counts, "_count_now", wraps=counts._count_now) as count_now:
        model(input_ids=IDS, labels=IDS.where(torch.arange(24) % 3 == 1, -100))
    assert seen == [rows]
    assert count_now.call_count == waits
