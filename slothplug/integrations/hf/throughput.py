"""The line at the end of training: tokens/s, peak memory, the share of padding, and what would remove it."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from slothplug.patching.unwrap import wrappers_and_core

WORTH_SAYING = 0.05
"""Share of padding from which on the option that removes it is named."""


class Throughput:
    """Counts what one training run feeds to a model and how long that takes.

    Positions are counted from shapes, on the host. What the attention mask shows is added up on the mask's own device
    and read once, at the end: nothing waits for the device in between. Batches are seen by a pre-hook on the model's
    base model (``model.base_model``), which is taken off at the end; where there is none, or it is compiled, nothing is
    said about tokens.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, padding_key: str | None) -> None:
        self._device = args.device
        self._processes = args.world_size
        self._padding_key = _padding_key(args) if padding_key is None else padding_key
        self._positions = 0
        self._masked_positions = 0
        self._attended: torch.Tensor | int = 0
        self._seconds = 0.0
        self._since: float | None = None
        core = wrappers_and_core(model)[1]
        base = getattr(core, "base_model", core)
        self._hook = base.register_forward_pre_hook(self._count, with_kwargs=True) if base is not core else None

    def resume(self) -> None:
        """A step begins."""
        if self._since is None:
            self._since = time.perf_counter()

    def mark(self) -> None:
        """A step has ended: what comes before the next one counts, unless ``leave_out`` follows."""
        now = time.perf_counter()
        self._seconds += now - (now if self._since is None else self._since)
        self._since = now

    def leave_out(self) -> None:
        """What has happened since the last step was an evaluation or a checkpoint."""
        self._since = time.perf_counter()

    def finish(self) -> str:
        """Takes the hook off and says what was seen."""
        if self._hook is not None:
            self._hook.remove()
        parts = []
        if self._positions and self._seconds:
            where = " on this process" if self._processes > 1 else ""
            parts.append(f"{self._positions / self._seconds:,.0f} tokens/s{where}")
        peak = peak_memory(self._device)
        if peak is not None:
            parts.append(f"peak memory {peak / 2**30:.2f} GiB")
        if self._masked_positions:
            parts.append(self._say_padding(1 - int(self._attended) / self._masked_positions))
        return ", ".join(parts)

    def _say_padding(self, share: float) -> str:
        said = f"{share:.0%} of the tokens were padding"
        if share < WORTH_SAYING or not self._padding_key:
            return said
        return f"{said}; {self._padding_key} would remove it, for up to {1 / (1 - share):.1f} times the speed"

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            return
        shape = tokens.shape[:2]
        self._positions += shape.numel()
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == shape:
            self._masked_positions += shape.numel()
            self._attended = self._attended + mask.count_nonzero()


def peak_memory(device: torch.device) -> int | None:
    """Bytes: of the GPU's allocator where there is a GPU, else the largest resident size of this process, if known."""
    if device.type != "cpu":
        peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return peak() if peak else None
    if sys.platform == "win32":
        return None
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def _padding_key(args: TrainingArguments) -> str:
    """How these arguments' framework removes padding."""
    for key in ("packing", "padding_free"):
        if hasattr(args, key):
            return f"{key}=True"
    return "data_collator=DataCollatorWithFlattening()"
