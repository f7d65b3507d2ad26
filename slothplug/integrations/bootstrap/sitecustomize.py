"""Runs at the start of each Python process below ``slothplug run``: opens the front doors, then runs the
``sitecustomize`` that this file shadows.

Python imports ``sitecustomize`` at start, and this folder is first on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def import_shadowed() -> None:
    """Runs the ``sitecustomize`` that would have run without this one, if any."""
    here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


importlib.import_module("slothplug_doors")  # beside this file: while its folder is still on the path
import_shadowed()
