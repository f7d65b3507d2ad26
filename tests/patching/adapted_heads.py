"""Tiny models with a LoRA adapter on the output head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import slothplug
from slothplug.patching.report import SiteReport
from tests.patching.heads import head_of, lora, make, step


def build(tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Any:
    """A tiny model with an adapter on its head, and on q_proj, whose B's are not zero."""
    return adapt(make(tie_word_embeddings=tied).to(dtype), seed, **changes)


def adapt(base: nn.Module, seed: int = 1, **changes: Any) -> Any:
    model: Any = lora(base, seed, **{"target_modules": ["q_proj", "lm_head"], **changes})
    nn.init.normal_(model.base_model.model.lm_head.lora_B["default"].weight, std=0.5)
    return model


def pair(**changes: Any) -> tuple[Any, Any, SiteReport]:
    """A patched model, one that is not, and the head's entry in the report."""
    model, stock = build(**changes), build(**changes)
    return model, stock, head_of(slothplug.patch(model, {"ops": ["head"]}))


def seeded_step(model: nn.Module, seed: int = 3, **inputs: Any) -> Any:
    torch.manual_seed(seed)
    return step(model, **inputs)


def assert_trained(outcome: Any) -> None:
    """The head's adapter is among what got a gradient, and both of its parts got one."""
    gradients = [gradient for name, gradient in outcome[1].items() if "lm_head.lora_" in name]
    assert len(gradients) == 2
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
