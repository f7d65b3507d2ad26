"""From an Axolotl configuration to settings, and to the advice about padding."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from slothplug.errors import SettingsError
from slothplug.integrations.chosen import Chosen, choose
from slothplug.integrations.hf.flag import flag_value
from slothplug.settings import FLAG, Settings

READ_LOGITS = ("rl", "orpo_alpha", "reward_model", "process_reward_model", "kd_trainer", "use_eaft", "do_bench_eval")
"""Keys whose objective or evaluation reads the model's logits."""

_DIFFUSION = "DiffusionPlugin"
"""The same, of a plugin that has no key to switch it on."""

_NOT_PACKED = ("rl", "reward_model", "process_reward_model")
"""Objectives on pairs or steps of a row. Axolotl refuses ``sample_packing`` for the first."""

_HOPPER = (9, 0)


def settings_of(cfg: Mapping[str, Any]) -> Chosen | None:
    """The settings that ``cfg``, raw or validated, stands for; None where the flag is absent or off.

    Raises:
        SettingsError: the flag or one of its settings is not valid, names an operation that there is not, or is
            misspelt.
    """
    flag = cfg.get(FLAG)
    if FLAG not in cfg:
        _refuse_misspelt(cfg)
    settings = Settings.from_flag(flag_value(flag)) if flag is not None else None
    return None if settings is None else choose(settings, _reader_of_logits(cfg))


def _refuse_misspelt(cfg: Mapping[str, Any]) -> None:
    """Raises where ``cfg`` has nearly our key, which Axolotl would drop without a word."""
    for key in difflib.get_close_matches(FLAG, cfg, n=1, cutoff=0.9):
        raise SettingsError(f"'{key}' is no key of Axolotl's. Did you mean '{FLAG}'?")


def _reader_of_logits(cfg: Mapping[str, Any]) -> str | None:
    for key in READ_LOGITS:
        value = cfg.get(key)
        if value:
            return f"{key}: {str(getattr(value, 'value', value)).lower()}"
    return next((plugin for plugin in cfg.get("plugins") or () if plugin.endswith(_DIFFUSION)), None)


def padding_key(cfg: Mapping[str, Any]) -> str:
    """The line that removes padding from a run of this validated configuration; empty where none does it rightly.

    Nothing is advised that Axolotl refuses or warns of: an attention that lets packed samples see each other, and
    `sdpa` in bfloat16 on GPUs before Hopper, where losses may come out as 0.
    """
    if any(cfg.get(key) for key in _NOT_PACKED) or not cfg.get("attn_decontaminates_packing"):
        return ""
    if cfg.get("attn_implementation") == "sdpa" and (cfg.get("bf16") or cfg.get("bfloat16")) and _before_hopper():
        return ""
    return "sample_packing: true"


def _before_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < _HOPPER
