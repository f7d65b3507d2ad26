"""The command ``slothplug-llamafactory`` for launchers that start a module, as ``torchrun -m`` does."""

from __future__ import annotations

from slothplug.integrations.llamafactory.command import main

main()
