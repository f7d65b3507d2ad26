"""The step time against the tokens of a step, from the results of ``short_steps``, as one picture.

python -m slothplug.bench.plot_short_steps docs/benchmarks/short_steps.json docs/benchmarks/short_steps.png
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer


def main(results: Path, picture: Path) -> None:
    """Draws every variant over the rows of one sequence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    rows: list[dict[str, Any]] = json.loads(results.read_text())
    lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row["row"].startswith("1x") and "error" not in row:
            tokens = math.prod(map(int, row["row"].split("x")))
            lines[row["variant"]].append((tokens, statistics.median(row["seconds"]) * 1e3))
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for variant, points in lines.items():
        tokens_of, milliseconds = zip(*sorted(points), strict=True)
        axes.plot(tokens_of, milliseconds, marker="o", label=variant)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a step of one sequence", ylabel="forward + backward, ms")
    ticks = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(ticks, [str(tokens) for tokens in ticks])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    typer.run(main)
