"""The packages that slothplug works with and their versions: the one table that ``patch`` and the doctor judge by.

The four sets in ``tests/versions`` are what the ranges were tested with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version
from torch import nn

Age = Literal["too old", "tested", "untested"]


@dataclass(frozen=True)
class Package:
    """A distribution that slothplug works with.

    Attributes:
        name: the distribution's name, also that of its Python package.
        use: what it is needed for.
        needed: training is impossible without it.
        lowest: the oldest supported minor release; None where any version will do.
        newest: the newest minor release that slothplug was tested with; None where no end is known.
    """

    name: str
    use: str
    needed: bool = False
    lowest: str | None = None
    newest: str | None = None

    @property
    def install(self) -> str:
        """The command that installs a tested version."""
        bounds = [f">={self.lowest}"] * bool(self.lowest)
        if self.newest:
            major, minor = Version(self.newest).release
            bounds.append(f"<{major}.{minor + 1}")
        return f"pip install '{self.name}{','.join(bounds)}'"

    def age(self, version: str) -> Age:
        """Where ``version`` lies. Ranges are of minor releases: "5.24.1" and "5.24.0.dev0" belong to 5.24."""
        number = Version(version)
        minor = Version(f"{number.major}.{number.minor}")
        if self.lowest and minor < Version(self.lowest):
            return "too old"
        if self.newest and minor > Version(self.newest):
            return "untested"
        return "tested"


TORCH = Package("torch", "everything", needed=True, lowest="2.6")
TRANSFORMERS = Package("transformers", "models and Trainer", needed=True, lowest="4.57", newest="5.24")
PEFT = Package("peft", "LoRA", lowest="0.18", newest="0.21")

PACKAGES = (
    TORCH,
    TRANSFORMERS,
    Package("accelerate", "Trainer", needed=True, lowest="1.1"),
    PEFT,
    Package("triton", "kernels on a GPU", lowest="3.2"),
    Package("trl", "SFTTrainer, DPOTrainer"),
    Package("bitsandbytes", "8-bit optimisers, quantised bases"),
    Package("axolotl", "its own runs"),
    Package("llamafactory", "its own runs"),
)


def loaded_for(model: nn.Module) -> Iterator[tuple[Package, str]]:
    """Those of torch, transformers and PEFT that a class of ``model`` comes from, with their loaded versions."""
    classes = {base for cls in {type(module) for module in model.modules()} for base in cls.__mro__}
    origins = {cls.__module__.partition(".")[0] for cls in classes}
    for package in (TORCH, TRANSFORMERS, PEFT):
        if package.name in origins:
            yield package, sys.modules[package.name].__version__
