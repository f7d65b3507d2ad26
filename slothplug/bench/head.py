"""Linear + cross-entropy, forward and backward: HF eager, its peers and slothplug beside each other, and bare products.

    python -m slothplug.bench.head --output docs/benchmarks/head

All share one process a case, but for Unsloth, which has its own. ``of bare products`` is the time over that of the
matrix products alone which any implementation must do (two with a frozen head, three with a trainable one, at full
size); provider and products take turns, so that both meet the clocks that such work leaves the GPU. ``extra`` is the
peak of GPU memory less inputs and gradients. ``error`` is the norm of a gradient's error against float64 over that of
stock's, the larger of the two: a peer above 1.25 computes something less exact and is no competitor in that row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from slothplug.bench.environment import in_own_process, markdown, show, spread, versions

IGNORED = -100
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""``loss(hidden [N, H], weight [V, H], labels [N], num_items)``: the sum over the labels that count, over num_items."""


@dataclass(frozen=True)
class Case:
    """One head, in bfloat16."""

    tokens: int
    hidden: int
    vocabulary: int
    trainable: bool
    ignored: float
    """Share of the labels that are ignored."""


SHAPES = ((8192, 4096, 128256), (16384, 896, 151936))
CASES = tuple(
    Case(*shape, trainable, ignored) for shape in SHAPES for trainable in (False, True) for ignored in (0, 0.6)
)


def _slothplug() -> Loss:
    from slothplug.kernels.cross_entropy import EpilogueStep
    from slothplug.kernels.linear_cross_entropy import linear_cross_entropy

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        # Here num_items is the number of labels that count, which a patched model knows without waiting for the GPU.
        cast: list[EpilogueStep] = [("cast", torch.float32)]
        total = linear_cross_entropy(
            hidden, weight, labels, reduction="sum", epilogue=cast, max_valid=num_items, backend="triton"
        )
        return total / num_items

    return loss


def stock_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
    """``transformers.loss.loss_utils.ForCausalLMLoss``, after its shift."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum") / num_items


def _torch_native() -> Loss:
    function: Any = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    return lambda hidden, weight, labels, num_items: function(hidden, weight, labels, reduction="sum") / num_items


def _liger(**options: Any) -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction="sum", **options)
    return lambda hidden, weight, labels, num_items: function(weight, hidden, labels) / num_items


def _cce(filter_eps: str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels, num_items: (
        linear_cross_entropy(hidden, weight, labels, reduction="sum", filter_eps=filter_eps, impl="cce") / num_items
    )


def _unsloth() -> Loss:
    import unsloth  # noqa: F401  (its zoo refuses to be imported alone)
    from unsloth_zoo.fused_losses.cross_entropy_loss import unsloth_fused_ce_loss

    return lambda hidden, weight, labels, num_items: unsloth_fused_ce_loss(
        None, hidden[None], weight, None, labels[None], n_items=torch.tensor(num_items), shift_labels=False
    )


PROVIDERS: Mapping[str, Callable[[], Loss]] = {
    "slothplug": _slothplug,
    "HF eager": lambda: stock_loss,
    "F.linear_cross_entropy": _torch_native,
    "Liger": _liger,
    "Liger, float32 sums": lambda: _liger(accum_dtype=torch.float32),
    "cut-cross-entropy, exact": lambda: _cce(None),
    "cut-cross-entropy, filtered": lambda: _cce("high"),
    "Unsloth": _unsloth,
}
# Patches torch and transformers when it is imported.
ALONE = "Unsloth"


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight and labels; logits have a standard deviation of about 1.3."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)  # noqa: E731
    hidden = draw(case.tokens, case.hidden).bfloat16().requires_grad_()
    weight = (draw(case.vocabulary, case.hidden) * (1.3 / case.hidden**0.5)).bfloat16().requires_grad_(case.trainable)
    labels = torch.randint(case.vocabulary, (case.tokens,), device="cuda", generator=generator)
    dropped = torch.rand(case.tokens, device="cuda", generator=generator) < case.ignored
    return hidden, weight, labels.masked_fill(dropped, IGNORED)


def oracle(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_items: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of hidden and weight in float64, 1024 rows at a time."""
    weight = weight.detach().double()
    grad_hidden, grad_weight = [], torch.zeros_like(weight)
    for rows, targets in zip(hidden.detach().double().split(1024), labels.split(1024), strict=True):
        gradient = torch.softmax(rows @ weight.T, 1)
        counted = targets != IGNORED
        gradient[counted, targets[counted]] -= 1
        gradient *= counted[:, None] / num_items
        grad_hidden.append(gradient @ weight)
        grad_weight.addmm_(gradient.T, rows)
    return torch.cat(grad_hidden), grad_weight


def milliseconds(runs: Sequence[Callable[[], Any]], repetitions: int) -> list[list[float]]:
    """GPU time of each run in each repetition, sorted, after two that do not count.

    The runs take turns, and the host does not wait between them, as in training.
    """
    for run in (*runs, *runs):
        run()
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs] for _ in range(repetitions)]
    for repetition in events:
        for run, (start, end) in zip(runs, repetition, strict=True):
            start.record()
            run()
            end.record()
    torch.cuda.synchronize()
    return [sorted(start.elapsed_time(end) for start, end in of_run) for of_run in zip(*events, strict=True)]


def bare_products(case: Case) -> Callable[[], None]:
    """The two or three products at full size, bfloat16 in and out."""
    hidden, weight, _ = inputs(case)
    hidden, weight = hidden.detach(), weight.detach()
    logits, grad_hidden, grad_weight = hidden @ weight.T, torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        if case.trainable:
            torch.mm(logits.T, hidden, out=grad_weight)

    return run


def step_of(loss: Callable[[], torch.Tensor], operands: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Forward and backward, without a wait; the gradients are left on the operands. Returns the loss."""

    def step() -> torch.Tensor:
        for operand in operands:
            operand.grad = None
        result = loss()
        result.backward()
        return result

    return step


def extra_bytes(step: Callable[[], Any], operands: Sequence[torch.Tensor]) -> int:
    """Peak memory beyond inputs and gradients."""
    step()  # compiles
    for operand in operands:
        operand.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    gradients = sum(operand.grad.nbytes for operand in operands if operand.grad is not None)
    return torch.cuda.max_memory_allocated() - before - gradients


def errors(operands: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> list[float]:
    """Each gradient's error over the norm of the float64 gradient."""
    gradients = [tensor.grad for tensor in operands if tensor.grad is not None]
    return [
        ((gradient.double() - exact).norm() / exact.norm()).item()
        for gradient, exact in zip(gradients, reference, strict=False)
    ]


def measure(names: Sequence[str], case: Case, repetitions: int) -> list[dict[str, Any]]:
    """A row for each provider; one that fails has ``error``."""
    operands = inputs(case)
    num_items = int((operands[2] != IGNORED).sum())
    reference = oracle(*operands, num_items)
    products = bare_products(case)
    rows: list[dict[str, Any]] = []
    for name in names:
        row: dict[str, Any] = {"provider": name, "case": asdict(case)}
        try:
            loss = PROVIDERS[name]()
            step = step_of(partial(loss, *operands, num_items), operands)
            row |= {"extra_bytes": extra_bytes(step, operands), "errors": errors(operands, reference)}
            row["loss"] = step().item()
            row["bare_ms"], row["ms"] = milliseconds([products, step], repetitions)
        except Exception as error:  # a peer may lack a kernel, a version or the memory; the table says so
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; the cases in order, the providers of each beside one another."""
    columns = (
        "tokens x hidden x vocabulary", "head", "ignored", "provider", "ms (min-max)", "of bare products", "extra, GB",
        "error, of stock's",
    )  # fmt: skip
    lines = []
    for case in CASES:
        own = [row for row in rows if row["case"] == asdict(case)]
        stock = next((row["errors"] for row in own if row["provider"] == "HF eager" and "errors" in row), None)
        shape = f"{case.tokens} x {case.hidden} x {case.vocabulary}"
        head = [shape, "trainable" if case.trainable else "frozen", f"{case.ignored:.0%}"]
        lines += [[*head, row["provider"], *_figures(row, stock)] for row in own]
    return markdown(columns, lines)


def _figures(row: Mapping[str, Any], stock: Sequence[float] | None) -> list[str]:
    if "failure" in row:
        return [row["failure"].splitlines()[0][:80], "", "", ""]
    error = max(ours / theirs for ours, theirs in zip(row["errors"], stock, strict=True)) if stock else None
    of_products = statistics.median(row["ms"]) / statistics.median(row["bare_ms"])
    extra = f"{row['extra_bytes'] / 1e9:.2f}"
    return [spread(row["ms"]), f"{of_products:.3f}", extra, "" if error is None else f"{error:.3g}"]


def measure_apart(names: Sequence[str], case: Case, repetitions: int, timeout: int) -> list[dict[str, Any]]:
    """``measure`` in a process of its own; rows with ``failure`` where that fails or runs out of time."""
    try:
        return in_own_process(measure, names, case, repetitions, timeout=timeout)
    except TimeoutError:
        failure = f"no answer within {timeout} s"
    except Exception as error:  # out of memory, say
        failure = f"{type(error).__name__}: {error}"
    return [{"provider": name, "case": asdict(case), "failure": failure} for name in names]


def main(
    providers: Annotated[str, typer.Option(help="Separated by semicolons; all by default.")] = ";".join(PROVIDERS),
    repetitions: int = 10,
    timeout: Annotated[int, typer.Option(help="Seconds a process may take.")] = 240,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
) -> None:
    """Times the head and prints a table."""
    names = providers.split(";")
    rows: list[dict[str, Any]] = []
    for group in ([name for name in names if name != ALONE], [name for name in names if name == ALONE]):
        for case in CASES if group else ():
            rows += measure_apart(group, case, repetitions, timeout)
    show(output, "head", "Linear + cross-entropy", rows, f"{versions()}\n\n{table(rows)}\n")


if __name__ == "__main__":
    typer.run(main)
