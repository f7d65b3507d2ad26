"""A plugin of the tests: it seeds what Axolotl does not seed, and writes down what a run logged and fused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

from slothplug.integrations.hf import FastKernelsCallback
from slothplug.patching.private_class import is_patched

NAME = "tests.axolotl.recorder.Recorder"


class Recorder(BasePlugin):
    trainer: Any = None

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        if not torch.cuda.is_available():
            cfg.device_map = None  # with several processes Axolotl names the GPU of the rank

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(5)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        torch.manual_seed(6)  # the trainers of DPO make the adapters themselves
        return []

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self.trainer = trainer

    def post_train(self, cfg: Any, model: Any) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        ours = [callback for callback in callbacks if isinstance(callback, FastKernelsCallback)]
        reference = getattr(self.trainer, "ref_model", None)
        record = {
            "log": self.trainer.state.log_history,
            "report": ours[0].report.to_dict() if ours else None,
            "callbacks": len(ours),
            "patched": sum(is_patched(module) for module in model.modules()),
            "reference": sum(is_patched(module) for module in reference.modules()) if reference is not None else None,
        }
        Path(cfg.output_dir, f"record-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record, default=str))

    def post_train_unload(self, cfg: Any) -> None:
        self.trainer = None
