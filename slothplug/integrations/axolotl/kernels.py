"""Axolotl's own LoRA kernels, which it switches on by itself: off where slothplug serves the model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def switch_off(cfg: MutableMapping[str, Any]) -> bool:
    """Sets the keys to ``False`` in a raw configuration that sets none of them, and says whether it did.

    Axolotl sets them to ``True`` when it validates such a configuration for LoRA or QLoRA. Where one key is set it
    leaves the others alone, and so does this.
    """
    by_itself = _has_adapters(cfg) and all(cfg.get(key) is None for key in LORA_KERNELS)
    if by_itself:
        cfg.update(dict.fromkeys(LORA_KERNELS, False))
    return by_itself


def note(cfg: Mapping[str, Any], switched_off: bool) -> str | None:
    """A sentence for the report of a run with adapters: that Axolotl's kernels are off, and who wrote so."""
    if not _has_adapters(cfg):
        return None
    keys = f"{', '.join(key for key in LORA_KERNELS if cfg.get(key) is False)}: false"
    if switched_off:
        return f"Axolotl's own LoRA kernels, which it switches on by itself, are off: slothplug set {keys}"
    return f"Axolotl's own LoRA kernels are off, as the configuration says ({keys})"


def _has_adapters(cfg: Mapping[str, Any]) -> bool:
    return cfg.get("adapter") in ("lora", "qlora") and not cfg.get("rl")
