"""The demo's picture: both loss curves, and their difference below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_curves(stock: Sequence[float], fast: Sequence[float], path: Path) -> Path:
    """Writes a PNG with the two training losses above and ``|fast - stock|`` on a logarithmic axis below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = range(1, len(stock) + 1)
    difference = [abs(ours - theirs) for ours, theirs in zip(fast, stock, strict=True)]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    above.plot(steps, stock, color="0.65", linewidth=5, label="stock HF + PEFT")
    above.plot(steps, fast, color="tab:blue", linewidth=1.5, label="use_fast_kernels")
    above.set_ylabel("training loss")
    above.set_title("LoRA fine-tuning, same seed, stock and with use_fast_kernels")
    above.legend(frameon=False)

    shown = [(step, value) for step, value in zip(steps, difference, strict=True) if value > 0]
    if shown:
        below.plot(*zip(*shown, strict=True), ".", color="tab:blue")
        below.set_yscale("log")
    else:
        below.text(0.5, 0.5, "equal to the last bit", transform=below.transAxes, ha="center", va="center")
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    figure.savefig(path, dpi=130)
    return path
