"""Lazy logits after the call that made them, after a step of the head, and when nobody holds them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slothplug import StaleLogitsError
from slothplug.ops.head.lazy_logits import LazyLogits
from tests.patching.lazy_head import LABELS, Head, V


def test_logits_that_no_loss_was_taken_of_are_real_when_the_call_ends() -> None:
    head = Head()
    logits = head.lazy() / 2
    head.call.close(completed=True)
    stock = head.stock() / 2
    with torch.no_grad():
        head.weight.zero_()
    assert torch.equal(logits + 0, stock)


def test_nothing_is_computed_when_a_call_fails_or_nobody_holds_the_logits() -> None:
    head = Head()
    logits = head.lazy()
    head.call.close(completed=False)
    assert not head.calls.fallbacks
    logits = head.lazy()
    call = head.call
    del logits, head
    gc.collect()
    call.close(completed=True)
    assert not call.calls.fallbacks


def test_a_second_loss_after_the_call_is_stock() -> None:
    head = Head()
    logits = head.lazy()
    F.cross_entropy(logits.view(-1, V), LABELS)
    head.call.close(completed=True)
    loss = F.cross_entropy(logits.view(-1, V), LABELS)
    assert head.calls.served == 1
    assert head.calls.fallbacks.total() == 1
    expected = torch.autograd.grad(F.cross_entropy(head.stock().view(-1, V), LABELS), head.operands)
    for ours, theirs in zip(torch.autograd.grad(loss, head.operands), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def after_a_loss(head: Head) -> LazyLogits:
    logits = head.lazy()
    F.cross_entropy(logits.view(-1, V), LABELS).backward()
    head.call.close(completed=True)
    return logits


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["loop", "fused", "foreach"])
@pytest.mark.parametrize("read", [lambda x: x + 0, lambda x: x.argmax(-1), lambda x: x.float().tolist()])
def test_reading_after_a_step_of_the_head_raises(options: dict[str, bool], read: Callable[[torch.Tensor], Any]) -> None:
    head = Head()
    logits = after_a_loss(head)
    torch.optim.AdamW([head.weight], lr=1e-2, **options).step()
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        read(logits)


def test_reading_before_the_step_is_fine_and_stays_so() -> None:
    head = Head()
    expected = head.stock().detach()
    logits = after_a_loss(head)
    assert torch.equal(logits.detach() + 0, expected)
    torch.optim.AdamW([head.weight], lr=1e-2, fused=True).step()
    assert torch.equal(logits.detach() + 0, expected)


def test_reading_after_a_step_is_fine_where_the_head_is_frozen() -> None:
    head = Head(bias=False)
    head.weight.requires_grad_(False)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    expected = head.stock().detach()
    logits = after_a_loss(head)
    torch.optim.AdamW([other], lr=1e-2).step()
    assert torch.equal(logits.detach() + 0, expected)


def test_a_loss_after_the_head_was_written_raises() -> None:
    head = Head()
    logits = head.lazy()
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(StaleLogitsError):
        logits + 0


@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_nothing_outlives_the_logits(soft_cap: bool, read: bool) -> None:
    head = Head()
    logits = head.lazy()
    hidden = weakref.ref(head.call)
    x = torch.tanh(logits / 3) * 3 if soft_cap else logits.float()
    loss = F.cross_entropy(x.view(-1, V), LABELS)
    if read:
        loss = loss + x.sum()
    loss.backward()
    head.call.close(completed=True)
    del logits, x, loss, head
    assert hidden() is None, "a cycle through the graph keeps the hidden states alive"
