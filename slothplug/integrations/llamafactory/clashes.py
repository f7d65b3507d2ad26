"""Keys of LLaMA-Factory, and of the Trainer's arguments in it, that ask for what slothplug does."""

from __future__ import annotations

from slothplug.integrations.clashes import Clash

_LIGER = ("rms_norm", "rotary", "glu", "head")

CLASHES = (
    Clash("enable_liger_kernel", "replaces norms, rotary embedding, MLPs and loss by Liger's", _LIGER),
    Clash("use_liger_kernel", "replaces norms, rotary embedding, MLPs and loss by Liger's", _LIGER),
    Clash("use_v1_kernels", "replaces forwards by LLaMA-Factory's own kernels"),
    Clash("use_unsloth_gc", "recomputes layers with other dropout masks than those of their forward"),
    Clash("use_kt", "replaces layers by those of KTransformers"),
)
