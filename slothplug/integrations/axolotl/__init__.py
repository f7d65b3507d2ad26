"""Axolotl: a plugin that serves ``use_fast_kernels`` in its YAML, and the front door that adds the plugin by itself.

Importing this changes nothing. The plugin changes the models that Axolotl loads for a configuration with the flag on;
``slothplug run`` and ``slothplug autoload`` wrap what ``slothplug.integrations.axolotl.frontdoor`` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slothplug.integrations.axolotl.plugin import SlothplugPlugin

__all__ = ["SlothplugPlugin"]


def __getattr__(name: str) -> Any:
    if name != "SlothplugPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from slothplug.integrations.axolotl.plugin import SlothplugPlugin
    except ImportError as error:
        # Axolotl goes on without a plugin whose import raises ImportError, and drops its keys without a word.
        raise RuntimeError(f"slothplug's Axolotl plugin cannot be loaded: {error}") from error
    return SlothplugPlugin
