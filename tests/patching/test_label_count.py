"""How many labels count: a bound that is known without a wait, and never believed against the labels themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import slothplug
from slothplug.ops.head import label_count
from slothplug.ops.head.label_count import Bound, LabelCount

LABELS = torch.tensor([-100, -100, 3, 4, -100, 5])


class Arrived:
    """A count that has come from the GPU."""

    def __init__(self, size: int, value: int) -> None:
        self.size, self._value = size, value

    def value(self) -> int:
        return self._value


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The labels that were counted at the loss."""
    seen: list[torch.Tensor] = []
    ask = label_count._ask

    def note(labels: torch.Tensor, ignore_index: int) -> int:
        seen.append(labels)
        return ask(labels, ignore_index)

    monkeypatch.setattr(label_count, "_ask", note)
    return seen


def test_only_the_first_loss_waits(asked: list[torch.Tensor]) -> None:
    bound = Bound()
    assert [bound.max_valid(LABELS, -100, Arrived(6, 4)) for _ in range(4)] == [4, 4, 4, 4]
    assert len(asked) == 1


def test_a_batch_without_ignored_labels_proves_nothing(asked: list[torch.Tensor]) -> None:
    bound, full = Bound(), LABELS.clamp(min=0)
    assert bound.max_valid(full, -100, Arrived(6, 6)) is None
    assert not asked
    # A model that makes ignored labels count, met only now.
    assert [bound.max_valid(full, -100, Arrived(6, 3)) for _ in range(2)] == [6, 6]
    assert len(asked) == 2


def test_a_model_that_makes_more_labels_count_is_not_believed(asked: list[torch.Tensor]) -> None:
    bound = Bound()
    assert [bound.max_valid(LABELS, -100, Arrived(6, 2)) for _ in range(3)] == [3, 3, 3]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("labels", "ignore_index", "count"),
    [(LABELS, 3, Arrived(6, 6)), (LABELS.repeat(2), -100, Arrived(6, 6)), (LABELS, -100, None)],
    ids=["another ignore_index", "more labels than the call had", "labels not seen at the call"],
)
def test_what_the_count_says_nothing_about_is_counted(
    labels: torch.Tensor, ignore_index: int, count: Any, asked: list[torch.Tensor]
) -> None:
    bound = Bound()
    bound._holds = True
    assert bound.max_valid(labels, ignore_index, count) == int((labels != ignore_index).sum())
    assert len(asked) == 1


def test_what_is_counted() -> None:
    count = LabelCount.start(LABELS)
    assert count is not None
    assert (count.size, count.value()) == (6, 3)
    assert LabelCount.start(None) is None
    assert LabelCount.start(LABELS.to("meta")) is None
    assert LabelCount.start([1, 2]) is None


class Rows(TorchDispatchMode):
    """Rows of every product with the head's weight, [1000, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm and tuple(args[1].shape) == (64, 1000):
            self.seen.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_leaves_ignored_rows_out(device: str, asked: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).to(device)
    model = copy.deepcopy(stock)
    tokens = torch.randint(1000, (2, 64), device=device)
    labels = tokens.masked_fill(torch.rand(2, 64, device=device) < 0.6, -100)
    slothplug.patch(model, {"ops": ["head"]})
    asked.clear()

    def step(one: torch.nn.Module) -> torch.Tensor:
        loss: torch.Tensor = one(input_ids=tokens, labels=labels).loss
        loss.backward()
        return loss.detach()

    step(model)
    model.zero_grad()
    with Rows() as rows:
        loss = step(model)
    assert rows.seen == {int((labels != -100).sum())}
    assert len(asked) == 1
    torch.testing.assert_close(loss, step(stock))
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
