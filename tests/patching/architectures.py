"""Small models of architectures that differ in how they rotate and how they gate, and one training step of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests.architectures.build import tiny_model
from tests.architectures.step import Step, train_step
from tests.patching.device import DEVICE

# Whoever imports them first: tests outside this folder do as well.
IDS = torch.arange(3, 43, device=DEVICE).view(2, 20)
LABELS = torch.where(torch.arange(20, device=DEVICE) < 4, -100, IDS)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 16},
    "phi3": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    "gpt_neox": {"rotary_pct": 0.25},
    "stablelm": {"partial_rotary_factor": 0.25},
    "ernie4_5": {},
    "olmo2": {},
    "deepseek_v3": {},
}


def tiny(architecture: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model in training mode; skips the test where this transformers does not have the architecture."""
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {architecture}")
    return tiny_model(architecture, seed, **{**ARCHITECTURES[architecture], **changes}).train()


def step(model: nn.Module, **inputs: Any) -> Step:
    """One training step of 2 x 20 tokens, from one state of the generators."""
    return train_step(model, input_ids=IDS, labels=LABELS, **inputs)


def moved_step(architecture: str) -> Step:
    """The step of a stock model whose weights are all moved to a neighbouring float32."""
    model = tiny(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return step(model)


def assert_same_step(got: Step, expected: Step, architecture: str | None = None) -> None:
    """Float32 steps that differ by the order of roundings only.

    Some models magnify roundings, on some CPUs beyond the bound: with ``architecture`` a gradient may then be as far
    from the expected one as that of ``moved_step``.

    Some gradients (a key's bias, to which softmax is blind) are sums that cancel: they are measured by the size of the
    model's gradients, not by their own.
    """
    assert got.gradients.keys() == expected.gradients.keys()
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-6, atol=1e-6)
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        mine = got.gradients[name]
        if architecture and not torch.allclose(mine, gradient, rtol=1e-4, atol=1e-6 * largest):
            magnified = (moved_step(architecture).gradients[name] - gradient).abs().max()
            assert (mine - gradient).abs().max() <= magnified, name
        else:
            torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-6 * largest, msg=name)
