"""An Axolotl plugin that times the steps of a run and writes what it saw into the run's output folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from axolotl.integrations.base import BasePlugin

from slothplug.bench.axolotl_step import MEASURED
from slothplug.bench.clock import Clock
from slothplug.integrations.hf import FastKernelsCallback

if TYPE_CHECKING:
    from torch import nn


class ClockPlugin(BasePlugin):
    """Writes ``measured.json``: seconds of each step, peak memory (bytes), losses, and slothplug's report if it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.trainer: Any = None

    def pre_lora_load(self, cfg: Any, model: nn.Module) -> None:
        """Axolotl does not seed before it makes the adapters."""
        torch.manual_seed(0)

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[Any]:
        return [self.clock]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self.trainer = trainer

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        reports = [one.report for one in callbacks if isinstance(one, FastKernelsCallback)]
        measured = {
            "seconds": self.clock.times,
            "peak_bytes": self.clock.peak_bytes,
            "losses": [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry],
            "report": reports[0].to_dict()["operations"] if reports and reports[0] else None,
            "left": sorted({f"{site.op}: {site.reason}" for one in reports if one for site in one.left}),
        }
        Path(cfg.output_dir, MEASURED).write_text(json.dumps(measured))
