"""What ``slothplug run`` puts in front of a Python process: the front doors, and the ``sitecustomize`` it shadows.

Python imports ``sitecustomize`` at start, and this folder is first on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def import_shadowed() -> None:
    """Runs the ``sitecustomize`` that would have run without this one, if there is one."""
    here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry) != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


importlib.import_module("slothplug_doors")  # beside this file: while its folder is still on the path
import_shadowed()
