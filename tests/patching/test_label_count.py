"""How many labels count: a bound that is known without a wait, used for labels that come from the counted ones only."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from slothplug.ops.head import label_count
from slothplug.ops.head.label_count import CountedLabels, max_valid, ordinary
from tests.patching.heads import IDS, assert_same, make, patched, step

LABELS = torch.tensor([[-100, -100, 3, 4], [-100, 5, -100, -100]])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The labels that were counted at the loss, with a wait."""
    seen: list[torch.Tensor] = []
    count_now = label_count._count_now

    def note(labels: torch.Tensor, ignore_index: int) -> int:
        seen.append(labels)
        return count_now(labels, ignore_index)

    monkeypatch.setattr(label_count, "_count_now", note)
    return seen


def counted(labels: torch.Tensor) -> CountedLabels:
    found = CountedLabels.start(labels.clone())
    assert found is not None
    return found


def mpt(x: torch.Tensor) -> torch.Tensor:
    shifted = torch.roll(x, shifts=-1)
    shifted[:, -1] = -100
    return shifted


KEEP_THE_BOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transformers": lambda x: F.pad(x, (0, 1), value=-100)[..., 1:].contiguous().view(-1).to("cpu"),
    "shifted": lambda x: x[:, 1:].reshape(-1),
    "masked": lambda x: x[..., 1:][x[..., 1:] > 3],
    "padding ignored": lambda x: x.masked_fill(x == 5, -100).flatten(),
    "rows split": lambda x: x.split(1)[0],
    "rolled and ignored": mpt,
    "clone": lambda x: x.clone().long().unsqueeze(0).squeeze(0).t(),
}


@pytest.mark.parametrize("derive", KEEP_THE_BOUND.values(), ids=KEEP_THE_BOUND)
def test_labels_made_of_counted_ones_are_not_counted_again(
    derive: Callable[[torch.Tensor], torch.Tensor], asked: list[torch.Tensor]
) -> None:
    derived = derive(counted(LABELS))
    assert torch.equal(ordinary(derived), derive(LABELS.clone()))
    bound = max_valid(derived, -100)
    assert not asked
    assert (3 if 7 / 8 * derived.numel() >= 3 else None) == bound
    assert int((derived != -100).sum()) <= 3


CHANGE_THE_TENSOR: dict[str, Callable[[Any], object]] = {
    "other data": lambda x: setattr(x, "data", torch.full_like(x, 7)),
    "transposed": lambda x: x.t_(),
    "a dimension more": lambda x: x.unsqueeze_(0),
    "filled": lambda x: x.fill_(5),
    "a keyword": lambda x: torch.neg_(input=x),
    "other memory": lambda x: x.set_(torch.full((3,), 7)),
}


@pytest.mark.parametrize("change", CHANGE_THE_TENSOR.values(), ids=CHANGE_THE_TENSOR)
def test_a_tensor_that_is_changed_in_place_is_changed_and_counted_anew(change: Callable[[Any], object]) -> None:
    labels, stock = counted(LABELS), LABELS.clone()
    change(labels)
    change(stock)
    assert torch.equal(ordinary(labels), stock)
    assert max_valid(labels, -100) == (stock != -100).sum()


def test_a_prefix_of_unknown_labels_counts_whole(asked: list[torch.Tensor]) -> None:
    """As PEFT's prompts are put in front."""
    assert max_valid(torch.cat((torch.full((2, 2), -100), counted(LABELS)), dim=1), -100) == 3 + 4
    assert max_valid(torch.cat((counted(LABELS), counted(LABELS))), -100) == 3 + 3
    assert not asked


LOSE_THE_BOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "written": lambda x: (x.__setitem__((0, 0), 7), x)[1],
    "written through an alias": lambda x: (x.view(-1).fill_(7), x)[1],
    "an alias of what is written later": lambda x: (lambda y: (x.fill_(7), y)[1])(x[:1]),
    "taken from what was written": lambda x: (x.add_(101), x)[1][:1],
    "ignored after another write": lambda x: (x.fill_(7), x.__setitem__((0, 0), -100), x)[2],
    "padded with a label": lambda x: F.pad(x, (0, 1), value=1),
    "padded with itself": lambda x: F.pad(x, (0, 1), mode="circular"),
    "filled with a label": lambda x: x.masked_fill(x == -100, 1),
    "filled and enlarged": lambda x: x[:1].masked_fill(torch.zeros(4, 4, dtype=torch.bool), -100),
    "rows chosen twice": lambda x: x[torch.tensor([0, 0, 0, 0])],
    "repeated": lambda x: x.repeat(3, 1),
    "expanded": lambda x: x[:1].expand(9, 4),
    "computed": lambda x: x.clamp(min=0),
    "through booleans": lambda x: x.to(torch.bool).long(),
    "other labels": lambda x: torch.arange(8).view(2, 4).to(x.device),
}


@pytest.mark.parametrize("derive", LOSE_THE_BOUND.values(), ids=LOSE_THE_BOUND)
def test_other_labels_are_counted_at_the_loss(
    derive: Callable[[torch.Tensor], torch.Tensor], asked: list[torch.Tensor]
) -> None:
    derived = derive(counted(LABELS))
    assert torch.equal(ordinary(derived), derive(LABELS.clone()))
    assert max_valid(derived, -100) == int((derived != -100).sum())
    assert len(asked) == 1


def test_another_ignore_index_is_counted_at_the_loss(asked: list[torch.Tensor]) -> None:
    assert max_valid(counted(LABELS), 3) == 7
    assert len(asked) == 1


def test_where_most_labels_count_every_row_takes_part(asked: list[torch.Tensor]) -> None:
    assert max_valid(counted(LABELS.clamp(min=0)), -100) is None
    assert not asked


def test_what_is_counted() -> None:
    assert CountedLabels.start(None) is None
    assert CountedLabels.start([1, 2]) is None
    assert CountedLabels.start(LABELS.to("meta")) is None
    assert CountedLabels.start(LABELS.float()) is None
    with torch.inference_mode():
        assert CountedLabels.start(LABELS + 0) is None, "whether such a tensor was written cannot be seen"
        labels = CountedLabels.start(LABELS)
        assert labels is not None
        assert type(labels + 0) is torch.Tensor
    with forward_ad.dual_level():
        assert CountedLabels.start(LABELS) is None


def test_counted_labels_are_a_tensor_like_any_other() -> None:
    labels = counted(LABELS)
    assert isinstance(labels, torch.Tensor)
    for read in (lambda x: x + 1, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.float().mean()):
        result = read(labels)
        assert type(result) is torch.Tensor
        assert torch.equal(result, read(LABELS))
    assert labels.tolist() == LABELS.tolist()
    assert str(labels) == str(LABELS)
    assert type(torch.nn.Embedding(101, 2)(labels[labels >= 0])) is torch.Tensor
    read = torch.compile(lambda x: F.pad(x, (0, 1), value=-100)[..., 1:].clamp(min=0).sum(), backend="eager")
    assert read(labels) == LABELS[:, 1:].clamp(min=0).sum()


def test_labels_and_shift_labels_of_context_parallelism(asked: list[torch.Tensor]) -> None:
    """As transformers' Trainer passes a rank's part of both: one may have a label more that counts than the other."""
    model, stock = make(), make()
    patched(model)
    asked.clear()  # of the probe
    for prompt in (20, 12):
        ids = IDS[:1]
        labels = ids.clone()
        labels[:, :prompt] = -100
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        first_half = {"input_ids": ids[:, :16], "labels": labels[:, :16], "shift_labels": shifted[:, :16]}
        assert_same(*(step(one, **first_half, num_items_in_batch=20) for one in (model, stock)))
    assert not asked


def test_a_model_that_makes_more_labels_count_in_some_calls(asked: list[torch.Tensor]) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor, more: bool = False, **_: Any) -> torch.Tensor:
        labels = labels.clamp(min=0) if more else labels
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")

    model, stock = make(), make()
    model.loss_function = stock.loss_function = loss
    patched(model)
    asked.clear()  # of the probe
    labels = IDS.where(IDS % 3 == 0, -100)
    for more in (False, True, False, True):
        assert_same(*(step(one, labels=labels, more=more) for one in (model, stock)))
    assert len(asked) == 2


class Rows(TorchDispatchMode):
    """Rows of every product with the head's weight, [128, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm and tuple(args[1].shape) == (32, 128):
            self.seen.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_a_model_leaves_ignored_rows_out(asked: list[torch.Tensor]) -> None:
    model, stock = make(), make()
    labels = IDS.where(IDS % 3 == 0, -100)
    patched(model)
    asked.clear()  # of the probe
    with Rows() as rows:
        outcome = step(model, labels=labels)
    assert rows.seen == {int((labels != -100).sum())}
    assert not asked
    assert_same(outcome, step(stock, labels=labels))


def test_labels_passed_by_position_are_counted_at_the_loss(asked: list[torch.Tensor]) -> None:
    model, stock = make(), make()
    patched(model)
    asked.clear()  # of the probe
    labels = IDS.where(IDS % 3 == 0, -100)
    position = list(inspect.signature(model.forward).parameters).index("labels")
    arguments = [IDS, *[None] * (position - 1), labels]
    torch.testing.assert_close(model(*arguments).loss, stock(*arguments).loss)
    assert len(asked) == 1
