"""What a benchmark's figures belong to: versions, device, and the command that made them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

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


def without_output(arguments: Sequence[str]) -> list[str]:
    """The command line without ``--output PATH``, whose path means nothing elsewhere."""
    return without(arguments, "--output")


def without(arguments: Sequence[str], option: str) -> list[str]:
    """The command line without ``option`` and its value."""
    at = arguments.index(option) if option in arguments else len(arguments)
    return [*arguments[:at], *arguments[at + 2 :]]
