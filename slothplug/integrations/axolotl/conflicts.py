"""Keys of Axolotl that ask for what slothplug does. Refused before the model is loaded, and never stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slothplug.integrations import conflicts
from slothplug.integrations.axolotl.kernels import LORA_KERNELS
from slothplug.integrations.conflicts import Conflict
from slothplug.settings import Settings

CONFLICTS = (
    *(Conflict(key, "replaces the forwards of attention and MLP by Axolotl's LoRA kernels") for key in LORA_KERNELS),
    Conflict("liger_rope", "replaces the rotary embedding", ("rotary",)),
    Conflict("liger_rms_norm", "replaces the norms", ("rms_norm",)),
    Conflict("liger_rms_norm_gated", "replaces the gated norms", ("rms_norm",)),
    Conflict("liger_glu_activation", "replaces the MLPs", ("glu",)),
    Conflict("liger_swiglu", "replaces the MLPs", ("glu",)),
    Conflict("liger_cross_entropy", "replaces the loss", ("head",)),
    Conflict("liger_fused_linear_cross_entropy", "replaces output head and loss", ("head",)),
    Conflict("cut_cross_entropy", "replaces output head and loss", ("head",)),
    Conflict("chunked_cross_entropy", "replaces the loss", ("head",)),
    Conflict("flash_attn_cross_entropy", "replaces the loss", ("head",)),
    Conflict("flash_attn_fuse_mlp", "replaces the MLPs"),
    Conflict("fused_attn_kernel", "replaces norms and rotary embedding", ("rms_norm", "rotary")),
    Conflict("tiled_mlp", "replaces the MLPs' forward"),
    Conflict("use_kernels", "replaces forwards by kernels of the Hub"),
    # `hidden_states` keeps whole inputs of layers and is the same beside fused kernels.
    Conflict("activation_offloading", "moves each saved tensor off the GPU", values=(True, "legacy", "disk")),
    Conflict("gradient_checkpointing", "moves each saved tensor off the GPU", values=("offload", "offload_disk")),
)

_PLUGIN_DEFAULTS = {"cut_cross_entropy": "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"}
"""Keys that are on as soon as a plugin is listed, and that plugin."""


def refuse(settings: Settings, cfg: Mapping[str, Any], written: frozenset[str] | None = None) -> None:
    """Raises where ``cfg`` holds keys that conflict with ``settings``.

    Args:
        settings: the settings of the flag.
        cfg: the configuration, raw or resolved.
        written: the keys that the user wrote, where ``cfg`` holds defaults as well.

    Raises:
        ConflictError: one or more keys conflict; all are named, each with the line to delete.
    """

    def mend(conflict: Conflict, value: object) -> str:
        if written is None or conflict.key in written:
            return conflicts.delete_line(conflict, value)
        if conflict.key in _PLUGIN_DEFAULTS:
            return f"Delete the line `- {_PLUGIN_DEFAULTS[conflict.key]}` under plugins, which switches it on"
        return f"Write `{conflict.key}: false`"

    conflicts.refuse(settings, CONFLICTS, cfg, mend=mend)
