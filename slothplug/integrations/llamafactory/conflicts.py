"""Keys of LLaMA-Factory, and of the Trainer's arguments in it, that ask for what slothplug does."""

from __future__ import annotations

from slothplug.integrations.conflicts import Conflict

_LIGER = ("rms_norm", "rotary", "glu", "head")

CONFLICTS = (
    Conflict("enable_liger_kernel", "replaces norms, rotary embedding, MLPs and loss by Liger's", _LIGER),
    Conflict("use_liger_kernel", "replaces norms, rotary embedding, MLPs and loss by Liger's", _LIGER),
    Conflict("use_v1_kernels", "replaces forwards by LLaMA-Factory's own kernels"),
    Conflict("use_unsloth_gc", "recomputes layers with other dropout masks than those of their forward"),
    Conflict("use_kt", "replaces layers by those of KTransformers"),
)
