"""The front door: what is wrapped in Axolotl so that ``use_fast_kernels: true`` alone, without ``plugins:``, is served.

Reached by ``slothplug run`` and ``slothplug autoload`` only. It changes
``axolotl.cli.config.prepare_plugins``, which Axolotl calls on every configuration that it has read, in each of its
processes: where the flag is on, our plugin is added to the configuration's list first. Once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

from slothplug.integrations.axolotl.translation import settings_of
from slothplug.integrations.wrapped import wrap

PLUGIN = "slothplug.integrations.axolotl.SlothplugPlugin"


def open_config(_: Callable[[Any], None]) -> None:
    """Wraps ``axolotl.cli.config.prepare_plugins``. Does nothing where that is done."""
    wrap("axolotl.cli.config", "prepare_plugins", _adding_plugin)


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

    return prepare_plugins
