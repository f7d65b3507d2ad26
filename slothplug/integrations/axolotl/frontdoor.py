"""The front door: what is wrapped in Axolotl so that ``use_fast_kernels: true`` alone, without ``plugins:``, is served.

Reached by ``slothplug run`` and ``axolotl slothplug`` only. It changes ``axolotl.cli.config.prepare_plugins``, which
Axolotl calls on every configuration that it has read, in each of its processes: where the flag is on, our plugin is
added to the configuration's list first. Once; ``close_config`` puts back what was there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from slothplug.integrations.axolotl.translation import settings_of

PLUGIN = "slothplug.integrations.axolotl.SlothplugPlugin"
_HOME = "axolotl.cli.config"
_NAME = "prepare_plugins"


def open_config(original: Callable[[Any], None]) -> None:
    """Wraps ``original`` (``axolotl.cli.config.prepare_plugins``). Does nothing where that is done."""
    if not hasattr(original, "_slothplug_original"):
        setattr(sys.modules[_HOME], _NAME, _adding_plugin(original))


def close_config() -> None:
    """Puts back Axolotl's function. Does nothing where it is not wrapped."""
    wrapped: Any = getattr(sys.modules.get(_HOME), _NAME, None)
    if hasattr(wrapped, "_slothplug_original"):
        setattr(sys.modules[_HOME], _NAME, wrapped._slothplug_original)


def add_plugin(cfg: MutableMapping[str, Any]) -> None:
    """Lists our plugin in a raw configuration that has the flag on and does not list it.

    Raises:
        SettingsError: the flag or one of its settings is not valid, or its name is misspelt.
    """
    listed = cfg.get("plugins") or []
    if settings_of(cfg) is not None and PLUGIN not in listed:
        cfg["plugins"] = [*listed, PLUGIN]


def _adding_plugin(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def prepare_plugins(cfg: Any) -> None:
        add_plugin(cfg)
        original(cfg)

    prepare_plugins._slothplug_original = original  # type: ignore[attr-defined]
    return prepare_plugins
