"""``slothplug run COMMAND``: the command, in an environment whose Python processes know ``use_fast_kernels``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BOOTSTRAP = Path(__file__).parent.parent / "integrations" / "bootstrap"
"""Folder of the ``sitecustomize`` that opens the front doors."""


def run(command: list[str]) -> int:
    """Becomes ``command``: its exit code, signals and terminal are those of the command itself.

    Every Python process below it, such as torchrun's workers, opens the front doors of the frameworks when it imports
    them. Processes that import none do nothing more than they would.

    Args:
        command: the command and its arguments; not empty.

    Returns:
        Only where the command could not be started: 127 if it was not found, 126 if it is not executable; as a shell
        does.
    """
    entries = [str(BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, os.environ | {"PYTHONPATH": os.pathsep.join(entries)})
    except FileNotFoundError:
        advice = f" Did you mean: slothplug run python {command[0]} ...?" if command[0].endswith(".py") else ""
        print(f"slothplug run: no command '{command[0]}' was found.{advice}", file=sys.stderr)
        return 127
    except PermissionError:
        advice = f" Did you mean: slothplug run python {command[0]} ...?" if command[0].endswith(".py") else ""
        print(f"slothplug run: '{command[0]}' is not executable.{advice}", file=sys.stderr)
        return 126
