"""``slothplug verify``: is this model as exact on fused kernels as it is without them?"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import slothplug
from slothplug.cli.float64 import Float64
from slothplug.cli.verify_model import Request, model_of
from slothplug.errors import SlothplugError
from slothplug.exactness import MODEL_WORST_FACTOR, Comparison
from slothplug.patching.report import Report
from slothplug.settings import Settings

ROWS = 2
IGNORED = -100


@dataclass
class Verdict:
    """All that was compared. A kind is a line of the table: one output, or one parameter's gradient in every layer."""

    report: Report
    dtype: torch.dtype
    """The one that the model computes in: the loss and float32 gradients are as rounded as its products are."""
    kinds: dict[str, Comparison] = field(default_factory=dict)

    @property
    def unequal(self) -> dict[str, str]:
        """The lines of the table in which the patched model is worse than stock, and how."""
        reasons = {name: kind.why_worse(MODEL_WORST_FACTOR) for name, kind in self.kinds.items()}
        return {name: reason for name, reason in reasons.items() if reason}


def run_verify(request: Request) -> int:
    """Prints the comparison; 0 where the patched model is as exact as stock, else 1."""
    console = Console()
    model = model_of(request)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{type(model).__name__}, {parameters / 1e6:.1f}M parameters, {request.dtype}", highlight=False)
    with console.status("Proving the sites") as status:

        def say(draw: int) -> None:
            status.update(f"Comparing stock and patched with float64: batch {draw + 1} of {request.draws}")

        verdict = compare(model, Settings(), request.draws, request.tokens, say)
    console.print(str(verdict.report), markup=False, highlight=False, soft_wrap=True)
    console.print(_table(verdict))
    console.print(
        f"Error: sqrt(sum |got - ref|^2 / sum |ref|^2) over {request.draws} random batches of {ROWS} x "
        f"{request.tokens} tokens. ref: the same weights and forward, every float32 in it replaced by float64.",
        highlight=False,
    )
    if verdict.unequal:
        for name, reason in verdict.unequal.items():
            console.print(f"[red]worse than stock[/red]: {name}: {reason}", highlight=False)
        return 1
    idle = verdict.report.idle()
    if idle:  # equal numbers say nothing about these
        for op, reason in idle.items():
            console.print(f"[red]not compared[/red]: {op} was fused and never ran fused ({reason})", highlight=False)
        return 1
    if not verdict.report.fused:
        console.print("[yellow]nothing was fused[/yellow]: both sides are stock", highlight=False)
        return 0
    console.print("[green]equal[/green]: the patched model is as exact as stock", highlight=False)
    return 0


def compare(
    model: nn.Module, settings: Settings, draws: int, tokens: int, on_draw: Callable[[int], None] = lambda draw: None
) -> Verdict:
    """Loss, logits and every gradient of ``model``, stock and patched, against its float64 reference.

    The reference has the same weights, widened. The patched model is a copy: ``model`` stays as it is.

    Args:
        model: a causal language model in train mode.
        settings: of the patch.
        draws: random batches of [2, tokens] whose errors are pooled; at least 2, for the bias to be judged.
        tokens: length of their rows.
        on_draw: called with the number of each batch before it is computed.
    """
    reference, patched = copy.deepcopy(model).double(), copy.deepcopy(model)
    verdict = Verdict(slothplug.patch(patched, settings), next(model.parameters()).dtype)
    for draw in range(draws):
        on_draw(draw)
        batch = _batch(model, draw, tokens)
        expected = _step(reference, batch, draw, Float64())
        theirs, ours = _step(model, batch, draw), _step(patched, batch, draw)
        if not expected.keys() == theirs.keys() == ours.keys():
            raise SlothplugError(f"Gradients of one side only: {sorted(theirs.keys() ^ ours.keys())}")
        for name, value in expected.items():
            kind = verdict.kinds.setdefault(_kind_of(name), Comparison(verdict.dtype))
            kind.add(draw, ours[name], theirs[name], value)
    return verdict


def _batch(model: nn.Module, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [2, tokens], and labels of which a quarter are ignored."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    ids = torch.randint(config.get_text_config().vocab_size, (ROWS, tokens), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.25, IGNORED)
    device = next(model.parameters()).device
    return ids.to(device), labels.to(device)


def _step(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    seed: int,
    mode: AbstractContextManager[object] | None = None,
) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients of a training step."""
    ids, labels = batch
    with mode or nullcontext():
        torch.manual_seed(seed)  # equal dropout masks on every side
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        found = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _kind_of(name: str) -> str:
    """The line of the table that a tensor belongs to: its name without the numbers of layers and common prefixes."""
    return (
        re.sub(r"\.\d+(?=\.)", ".*", name)
        .replace("base_model.model.", "")
        .removeprefix("model.")
        .replace(".default.", ".")
    )


def _table(verdict: Verdict) -> Table:
    table = Table(title="error against float64", title_justify="left")
    for column in ("output, or gradient of", "stock", "patched", ""):
        table.add_column(column, justify="left" if column.startswith("output") else "right")
    unequal = verdict.unequal
    for index, (name, kind) in enumerate(verdict.kinds.items()):
        outcome = "[red]worse[/red]" if name in unequal else "ok"
        table.add_row(name, f"{kind.stock.energy:.1e}", f"{kind.ours.energy:.1e}", outcome, end_section=index == 1)
    return table
