"""``python -m slothplug.integrations.llamafactory train cfg.yaml``: the command ``slothplug-llamafactory``."""

from __future__ import annotations

from slothplug.integrations.llamafactory.command import main

main()
