"""What it costs to know how many labels count, and what it saves: short training steps, where a wait shows most.

    python -m slothplug.bench.label_count

The steps of all ways take turns in one process, forward and backward of a LoRA model without an optimizer. Each ends
with a wait for its loss, as a Trainer that logs every step has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import nn

import slothplug
from slothplug.bench.environment import spread, versions
from slothplug.bench.steps import SHAPES, random_model
from slothplug.ops.head import fused_loss
from slothplug.ops.head.label_count import CountedLabels

IGNORED = -100


def counted_at_the_loss() -> AbstractContextManager[Any]:
    """One wait for the device at the loss."""
    return mock.patch.object(CountedLabels, "start", return_value=None)


@contextmanager
def not_counted() -> Iterator[None]:
    """Every row takes part."""
    with counted_at_the_loss(), mock.patch.object(fused_loss, "max_valid", return_value=None):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "not counted": not_counted,
    "counted at the call": nullcontext,
    "counted at the loss": counted_at_the_loss,
}


def lora_model(shape: str) -> nn.Module:
    """A patched model in bfloat16 with random weights and adapters of rank 16 on all linears."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = get_peft_model(random_model(SHAPES[shape]), lora)
    slothplug.patch(model)
    return model.train()


def step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds from the call to the arrival of the loss on the host."""
    model.zero_grad()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    loss.item()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen2.5-0.5b",
    batch: int = 1,
    length: int = 512,
    repetitions: int = 20,
) -> None:
    """Prints a table of the three ways, without and with ignored labels."""
    model = lora_model(shape)
    ids = torch.randint(SHAPES[shape]["vocab_size"], (batch, length), device="cuda")
    print("| shape | tokens | ignored | labels are | step, ms (min-max) |\n| --- | --- | --- | --- | --- |")
    for share in (0.0, 0.6):
        labels = ids.masked_fill(torch.rand(ids.shape, device="cuda") < share, IGNORED)
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for repetition in range(repetitions + 3):
            for name, way in WAYS.items():
                with way():
                    took = step(model, ids, labels)
                if repetition >= 3:
                    seconds[name].append(took * 1e3)
        for name, found in seconds.items():
            print(f"| {shape} | {batch} x {length} | {share:.0%} | {name} | {spread(found)} |")
    print(f"\n{versions()}")


if __name__ == "__main__":
    typer.run(main)
