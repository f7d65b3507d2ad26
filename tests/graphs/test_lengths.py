"""Lengths that recur are recorded, and lengths that vary share recordings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import slothplug
from tests.graphs.steps import OFF, ON, OTHER, PADDED, assert_same, gradients, replays, state_of, step, twins, units
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, LAYERS, assert_equal, model


def test_lengths_that_recur_are_recorded_and_others_run_eagerly() -> None:
    graphed, eager, report = twins()
    for length in (10, 7, 10, 5, 10, 7, 4, 10, 7):
        ids = IDS[:, :length].contiguous()
        assert_same(step(graphed, ids), step(eager, ids))
    assert replays(graphed) == 3 * LAYERS  # the third and fourth of 10, the third of 7
    assert "6 calls of layers ran eagerly: shapes that had not recurred yet" in str(report)


def test_the_shapes_used_least_recently_go() -> None:
    graphed, eager = model().to(DEVICE), model().to(DEVICE)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, {**ON, "graph_shapes": 1, "graph_after": 1})
    for ids, expected in ((IDS, 0), (IDS, 1), (OTHER, 1), (OTHER, 2), (IDS, 2), (IDS, 3), (IDS, 4)):
        assert_same(step(graphed, ids), step(eager, ids))
        assert replays(graphed) == expected * LAYERS


LENGTHS = (70, 100, 120, 90, 128, 64, 65, 127, 30, 64, 33, 100, 128, 20)


def of_lengths(graphed: nn.Module, eager: nn.Module, batch: int) -> None:
    """Steps of varying lengths, equal to those of the eager model but for the order of sums in the products."""
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(0, 61, (batch, length), generator=torch.Generator(DEVICE).manual_seed(i), device=DEVICE)
        assert_equal(step(graphed, ids)[:2], step(eager, ids)[:2])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "not reentrant"])
def test_lengths_share_recordings(checkpointing: str, batch: int) -> None:
    graphed = model().to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, PADDED)
    if checkpointing != "off":
        for one in (graphed, eager):
            one.enable_input_require_grads()
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    of_lengths(graphed, eager, batch)
    assert len(state_of(graphed).sessions) == 2
    eager_calls = {reason: n for reason, n in state_of(graphed).reasons.items() if "checkpointing" not in reason}
    assert eager_calls.keys() == {"shapes that had not recurred yet"}
    assert replays(graphed) == (len(LENGTHS) - sum(eager_calls.values())) * LAYERS * (
        1 if checkpointing == "off" else 2
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lengths_of_batches_with_padding_share_recordings(side: str, checkpointing: bool) -> None:
    eager = model().to(DEVICE)
    graphed = copy.deepcopy(eager)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, PADDED)
    if checkpointing:
        for one in (graphed, eager):
            one.gradient_checkpointing_enable({"use_reentrant": False})
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(0, 61, (3, length), generator=torch.Generator(DEVICE).manual_seed(i), device=DEVICE)
        mask = torch.ones_like(ids)
        for row in (1, 2):
            mask[row, slice(-row * 5, None) if side == "right" else slice(row * 5)] = 0
        labels = ids.masked_fill(mask == 0, -100)
        outcomes = []
        for one in (graphed, eager):
            one.zero_grad()
            answer = one(input_ids=ids, attention_mask=mask, labels=labels)
            answer.loss.backward()
            outcomes.append((answer.loss.detach(), gradients(one)))
        assert_equal(*outcomes)
    assert len(state_of(graphed).sessions) == 2
    eager_calls = {reason for reason in state_of(graphed).reasons if "checkpointing" not in reason}
    assert eager_calls == {"shapes that had not recurred yet"}
    assert replays(graphed) > 5 * LAYERS


def test_a_mask_that_means_the_opposite_is_recorded_for_its_own_lengths() -> None:
    """True where a position is not seen: what is filled in would show what follows."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return functional.scaled_dot_product_attention(h, h, h, attn_mask=~hidden[:, 0])

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1).expand(2, 1, -1, -1).contiguous()

    graphed, eager = units(Unit, hidden, hidden)
    with torch.no_grad():
        for length in (5, 6, 7, 8, 5, 6, 7, 8, 5, 5, 5):
            x = torch.randn(2, length, 16)
            assert torch.equal(graphed(x), eager(x))


def test_a_unit_that_reads_later_positions_is_recorded_for_its_own_lengths() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + x.mean(dim=1, keepdim=True)

    graphed, eager = units(Unit)
    for length in (10, 12, 10, 12, 10, 12, 11, 10, 12):
        x = torch.randn(2, length, 16)
        assert torch.equal(graphed(x), eager(x))
    assert any("depends on what follows" in reason for reason in state_of(graphed).reasons)


def test_dropout_keeps_each_length_to_itself() -> None:
    graphed = model(lora_dropout=0.2).to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, PADDED)
    for ids in (IDS, OTHER, IDS, OTHER, IDS, OTHER, IDS, OTHER, IDS, OTHER):
        assert_same(step(graphed, ids), step(eager, ids))
    assert replays(graphed) > 0


@pytest.mark.parametrize("most_tokens", [15, 2048])
def test_a_longer_sequence_than_ever_finds_the_memory_of_the_recordings(
    most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slothplug.graphs.call._MOST_TOKENS", most_tokens)
    graphed, eager, _ = twins()
    short = IDS[:, :4].contiguous()
    for _ in range(4):
        assert_same(step(graphed, short), step(eager, short))
    assert replays(graphed) == 2 * LAYERS
    assert_same(step(graphed), step(eager))
    assert not state_of(graphed).sessions
    for _ in range(4):
        assert_same(step(graphed, short), step(eager, short))
    assert replays(graphed) == 4 * LAYERS
