"""What a benchmark's figures belong to: versions, device, and the command that made them."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "axolotl", "liger-kernel", "bitsandbytes")


def versions() -> str:
    """One line with the device and the versions of what is installed of ``PACKAGES``."""
    import torch

    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}; " + ", ".join(found)


def in_own_process(function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
    """What ``function(*arguments)`` returns or raises in a process of its own, which gives the GPU's memory back.

    Raises:
        TimeoutError: there was no answer in ``timeout`` seconds.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result(timeout)
        except TimeoutError:
            for child in multiprocessing.active_children():
                child.kill()  # the pool would wait for it
            raise


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))


def spread(times: Sequence[float], digits: int = 2) -> str:
    """The median, and the smallest and largest value."""
    return f"{statistics.median(times):.{digits}f} ({min(times):.{digits}f}-{max(times):.{digits}f})"


def show(output: Path | None, module: str, title: str, rows: Sequence[Any], text: str) -> None:
    """Prints ``text``. Where ``output`` is given, writes OUTPUT.json with ``rows``, and OUTPUT.md with the title, the
    command line of ``module`` and ``text``."""
    print(text)
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    command = f"python -m slothplug.bench.{module} {shlex.join(without(sys.argv[1:], '--output'))}".rstrip()
    output.with_suffix(".md").write_text(f"# {title}\n\n    {command}\n\n{text}")


def without(arguments: Sequence[str], option: str) -> list[str]:
    """The command line without ``option`` and its value, as a path that means nothing elsewhere."""
    at = arguments.index(option) if option in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :]]
