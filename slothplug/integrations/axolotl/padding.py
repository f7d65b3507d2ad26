"""Whether Axolotl's option that removes padding can be advised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_NOT_PACKED = ("rl", "reward_model", "process_reward_model")
"""Objectives on pairs or steps of a row. Axolotl refuses ``sample_packing`` for the first."""

_HOPPER = (9, 0)


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
