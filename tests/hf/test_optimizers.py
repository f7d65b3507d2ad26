"""Optimizers that write weights without raising their version: nothing of ours may keep an old weight."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from slothplug.integrations.hf import FastKernelsCallback
from tests.hf.tiny import RecordingTrainer, arguments, llama, rows, with_lora

RATE = 3e-2


def _losses_and_weights(
    folder: Path, fast: bool, lora: bool, optimizer: str, autocast: bool, rate: float = RATE, moved: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """``moved``: every weight begins at its neighbour in its dtype."""
    model = with_lora(llama(layers=1)) if lora else llama(layers=1)
    if moved:
        for parameter in model.parameters():
            parameter.data = torch.nextafter(parameter.data, torch.tensor(torch.inf))
    trainer = RecordingTrainer(
        model,
        arguments(folder, optim=optimizer, max_steps=5, learning_rate=rate, bf16=autocast),
        train_dataset=rows(32, "padded"),
        callbacks=[FastKernelsCallback()] if fast else [],
    )
    trainer.train()
    return trainer.losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("lora", "autocast"), [(True, False), (True, True), (False, False)], ids=["lora", "lora, autocast", "full"]
)
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_five_steps(tmp_path: Path, optimizer: str, lora: bool, autocast: bool) -> None:
    if optimizer == "adamw_bnb_8bit":
        _skip_without_8_bit_steps()
    losses, weights = _losses_and_weights(tmp_path, True, lora, optimizer, autocast)
    expected_losses, expected = _losses_and_weights(tmp_path, False, lora, optimizer, autocast)
    # Adam divides a gradient near 0 by its own size: an element may go the other way by one step, in stock as well.
    moved, _ = _losses_and_weights(tmp_path, False, lora, optimizer, autocast, moved=True)
    rounding = max(abs(a - b) for a, b in zip(moved, expected_losses, strict=True))
    assert losses == pytest.approx(expected_losses, abs=2e-2 if autocast else 1e-5 + 4 * rounding)
    untrained, _ = _losses_and_weights(tmp_path, False, lora, optimizer, autocast, rate=0.0)
    assert untrained[-1] - expected_losses[-1] > 0.04  # an old weight would show
    if not autocast:
        for name, weight in expected.items():
            assert (weights[name] - weight).norm() <= 1e-2 * (RATE * weight.numel() ** 0.5), name


def _skip_without_8_bit_steps() -> None:
    """Releases of bitsandbytes differ in what their optimizers do on a CPU."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.optim import AdamW8bit

    parameter = torch.nn.Parameter(torch.ones(8192))
    parameter.grad = torch.ones(8192)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            AdamW8bit([parameter]).step()
    except Exception as error:
        pytest.skip(f"bitsandbytes has no 8-bit optimizer for this device: {error}")
