"""Keys of Axolotl that ask for what slothplug does. Refused before the model is loaded, and never stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slothplug.integrations import clashes
from slothplug.integrations.axolotl.kernels import LORA_KERNELS
from slothplug.integrations.clashes import Clash
from slothplug.settings import Settings

CLASHES = (
    *(Clash(key, "replaces the forwards of attention and MLP by Axolotl's own LoRA kernels") for key in LORA_KERNELS),
    Clash("liger_rope", "replaces the rotary embedding", ("rotary",)),
    Clash("liger_rms_norm", "replaces the norms", ("rms_norm",)),
    Clash("liger_rms_norm_gated", "replaces the gated norms", ("rms_norm",)),
    Clash("liger_glu_activation", "replaces the MLPs", ("glu",)),
    Clash("liger_swiglu", "replaces the MLPs", ("glu",)),
    Clash("liger_cross_entropy", "replaces the loss", ("head",)),
    Clash("liger_fused_linear_cross_entropy", "replaces output head and loss", ("head",)),
    Clash("cut_cross_entropy", "replaces output head and loss", ("head",)),
    Clash("chunked_cross_entropy", "replaces the loss", ("head",)),
    Clash("flash_attn_cross_entropy", "replaces the loss", ("head",)),
    Clash("flash_attn_fuse_mlp", "replaces the MLPs"),
    Clash("fused_attn_kernel", "replaces norms and rotary embedding", ("rms_norm", "rotary")),
    Clash("tiled_mlp", "replaces the MLPs' forward"),
    Clash("use_kernels", "replaces forwards by kernels of the Hub"),
    # `hidden_states` keeps whole inputs of layers and is the same beside fused kernels.
    Clash("activation_offloading", "moves each saved tensor off the GPU", values=(True, "legacy", "disk")),
    Clash("gradient_checkpointing", "moves each saved tensor off the GPU", values=("offload", "offload_disk")),
)

_PLUGIN_DEFAULTS = {"cut_cross_entropy": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"}
"""Keys that are on as soon as a plugin is listed, and that plugin."""


def refuse(settings: Settings, cfg: Mapping[str, Any], written: frozenset[str] | None = None) -> None:
    """Raises where ``cfg`` holds keys that clash with ``settings``.

    Args:
        settings: the settings of the flag.
        cfg: the configuration, raw or resolved.
        written: the keys that the user wrote, where ``cfg`` holds defaults as well.

    Raises:
        ConflictError: one or more keys clash; all are named, each with the line to delete.
    """

    def mend(clash: Clash, value: object) -> str:
        if written is None or clash.key in written:
            return clashes.delete_line(clash, value)
        if clash.key in _PLUGIN_DEFAULTS:
            return f"Delete the line `- {_PLUGIN_DEFAULTS[clash.key]}` under plugins, which switches it on"
        return f"Write `{clash.key}: false`"

    clashes.refuse(settings, CLASHES, cfg, mend=mend)
