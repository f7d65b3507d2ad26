"""The plugin: which of Axolotl's moments does what. What is done stands in the other files of this package."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin

from slothplug.integrations.axolotl import conflicts, kernels, log
from slothplug.integrations.axolotl.frontdoor import PLUGIN
from slothplug.integrations.axolotl.translation import padding_key, settings_of
from slothplug.settings import FLAG

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback

logger = logging.getLogger("slothplug")


class SlothplugPlugin(BasePlugin):
    """Serves ``use_fast_kernels`` in an Axolotl configuration.

    ``plugins: [slothplug.integrations.axolotl.SlothplugPlugin]`` in the YAML. Without the flag it says that it does
    nothing, with ``false`` it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._switched_off = False

    def register(self, cfg: Any) -> None:
        """Reads the configuration as the user wrote it: the only moment that can tell that from Axolotl's defaults.

        Axolotl calls this more than once for a configuration, and for configurations that do not list the plugin.

        Raises:
            SettingsError: the flag or one of its settings is not valid.
            ConflictError: another key asks for what slothplug does.
        """
        chosen = settings_of(cfg)
        if chosen is not None:
            log.show()
            conflicts.refuse(chosen.settings, cfg)
            self._switched_off = kernels.switch_off(cfg)
        elif cfg.get(FLAG) is None and PLUGIN in (cfg.get("plugins") or ()):
            log.show()
            logger.info("slothplug: nothing is patched, since the YAML has no %s; write `%s: true` into it", FLAG, FLAG)

    def get_input_args(self) -> str:
        return "slothplug.integrations.axolotl.arguments.SlothplugAxolotlArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patches every model that Axolotl loads to compute with, after its own patches and its adapters.

        For DPO that is the policy and the reference model. A model that is loaded to be merged stays stock.

        Raises:
            ConflictError: the model was already changed by other kernels.
        """
        chosen = settings_of(cfg)
        if chosen is None or cfg.merge_lora:
            return
        from slothplug.patching.patch import patch

        patch(model, chosen.settings)

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[TrainerCallback]:
        """The Trainer's callback: it serves adapters that the trainer itself adds, and prints the report."""
        chosen = settings_of(cfg)
        if chosen is None:
            return []
        from slothplug.integrations.hf import FastKernelsCallback

        notes = [note for note in (kernels.note(cfg, self._switched_off), chosen.note) if note]
        return [FastKernelsCallback(chosen.settings, padding_key=padding_key(cfg), notes=notes)]
