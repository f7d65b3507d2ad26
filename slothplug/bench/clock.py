"""Times the steps of a Trainer."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Seconds of each step, from ``on_step_begin`` to ``on_step_end`` with the GPU synchronized at both ends."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._peak_of_steps = 0

    @property
    def peak_bytes(self) -> int:
        """The allocator's peak since training began; of the whole process without a GPU."""
        if torch.cuda.is_available():
            return max(self._peak_of_steps, torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self.times.append(time.perf_counter() - self._start)
        if torch.cuda.is_available():  # Axolotl resets the allocator's peak where it logs
            self._peak_of_steps = max(self._peak_of_steps, torch.cuda.max_memory_allocated())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
