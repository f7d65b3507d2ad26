"""Which module is a model's output head, and why a head is left."""

from __future__ import annotations

import sys
from types import FunctionType

from torch import nn

from slothplug.ops.head import adapter
from slothplug.patching.private_class import stock_class
from slothplug.patching.sites import Refusal
from slothplug.settings import Settings


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The model's output head; where PEFT keeps trainable copies of it, those."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return []
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(head, peft.utils.ModulesToSaveWrapper):
        return list(head.modules_to_save.values())
    return [head]


def why_not_head(head: nn.Module, model: nn.Module, settings: Settings) -> Refusal | None:
    """Why the head cannot be served, or should not be."""
    base = stock_class(head)
    if adapter.is_lora(head):
        if refusal := adapter.why_not_plain_lora(head):
            return refusal
    elif base.__module__.startswith("peft."):
        return Refusal(f"an adapter is on the head ({base.__name__}): its own weight is not all that it multiplies by")
    elif base is not nn.Linear:
        return Refusal(f"the head is {base.__module__}.{base.__qualname__}, not a plain linear layer")
    if settings.keep_logits:
        return Refusal("keep_logits is set", excused=True)
    if trl_computes_the_loss(model):
        return Refusal("TRL's own fused head computes the loss of this model", excused=True)
    return None


def trl_computes_the_loss(model: nn.Module) -> bool:
    """Whether TRL put its fused head on the model: it reads the head's weight and never calls the head."""
    # accelerate wraps a model's forward in autocast and keeps the one that was there.
    forwards = [getattr(model.__dict__.get(name), "__func__", None) for name in ("forward", "_original_forward")]
    return any(isinstance(f, FunctionType) and f.__globals__.get("__name__", "").startswith("trl.") for f in forwards)
