"""Axolotl's own LoRA kernels, which it switches on by itself: off where slothplug serves the model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def switch_off(cfg: MutableMapping[str, Any]) -> None:
    """Sets the keys to ``False`` in a raw configuration that sets none of them.

    Axolotl sets them to ``True`` when it validates such a configuration for LoRA or QLoRA. Where one key is set it
    leaves the others alone, and so does this.
    """
    if _has_adapters(cfg) and all(cfg.get(key) is None for key in LORA_KERNELS):
        cfg.update(dict.fromkeys(LORA_KERNELS, False))


def note(cfg: Mapping[str, Any]) -> str | None:
    """A sentence for the report of a run that would have had Axolotl's kernels without slothplug."""
    if not _has_adapters(cfg):
        return None
    return f"Axolotl's own LoRA kernels, which it switches on by itself, are off ({', '.join(LORA_KERNELS)}: false)"


def _has_adapters(cfg: Mapping[str, Any]) -> bool:
    return cfg.get("adapter") in ("lora", "qlora") and not cfg.get("rl")
