"""What a benchmark's figures belong to: versions, device, and the command that made them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
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


def write(output: Path, module: str, title: str, rows: Sequence[Any], text: str) -> None:
    """OUTPUT.json with ``rows``; OUTPUT.md with the title, the command line of ``module`` and ``text``."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    command = f"python -m slothplug.bench.{module} {shlex.join(without_output(sys.argv[1:]))}".rstrip()
    output.with_suffix(".md").write_text(f"# {title}\n\n    {command}\n\n{text}")


def without_output(arguments: Sequence[str]) -> list[str]:
    """The command line without ``--output PATH``, whose path means nothing elsewhere."""
    return without(arguments, "--output")


def without(arguments: Sequence[str], option: str) -> list[str]:
    """The command line without ``option`` and its value."""
    at = arguments.index(option) if option in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :]]
