"""Lazy logits in a graph: custom Functions, hooks, second derivatives, and calls without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slothplug import StaleLogitsError
from tests.patching.lazy_head import LABELS, Head, V


class Square(torch.autograd.Function):
    """A custom Function that looks at memory, as one with a kernel of its own does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr() != 0
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output


class Doubled(torch.autograd.Function):
    """Returns what it got, and doubles the gradient: visible only where its node is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        return {"same": x, "view": x.view(x.shape), "clone": x.clone(), "detach": x.detach()}[how]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * grad_output, None


def test_a_custom_function_gets_values_and_its_gradient_flows() -> None:
    Head().check(lambda x: Square.apply(x.float() * 0.5), fused=False)


@pytest.mark.parametrize("how", ["same", "view", "clone", "detach"])
def test_a_custom_function_between_head_and_loss_is_not_jumped_over(how: str) -> None:
    Head().check(lambda x: F.cross_entropy(Doubled.apply(x, how).view(-1, V), LABELS), fused=False)


def test_hooks_and_retained_gradients_get_the_gradient_of_the_logits() -> None:
    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        x.register_hook(seen.append)
        x.retain_grad()
        F.cross_entropy(x.view(-1, V), LABELS).backward()
        return [*seen, x.grad]

    head = Head()
    for ours, theirs in zip(gradients(head.lazy()), gradients(head.stock()), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_hook_after_the_fused_loss_is_refused() -> None:
    logits = Head().lazy()
    F.cross_entropy(logits.view(-1, V), LABELS)
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        logits.register_hook(print)


def test_double_backward_through_read_logits() -> None:
    head = Head()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.exp().sum(), head.hidden, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(head.stock()), head.operands)
    for ours, theirs in zip(torch.autograd.grad(penalty(head.lazy()), head.operands), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trains", [(True, False), (False, True), (False, False)], ids=["hidden", "head", "nothing"])
def test_what_needs_no_gradient_gets_none(trains: tuple[bool, bool]) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/930
    head = Head(bias=False)
    head.hidden.requires_grad_(trains[0])
    head.weight.requires_grad_(trains[1])
    logits = head.lazy()
    loss, expected = F.cross_entropy(logits.view(-1, V), LABELS), F.cross_entropy(head.stock().view(-1, V), LABELS)
    torch.testing.assert_close(loss, expected)
    assert logits.requires_grad == loss.requires_grad == expected.requires_grad == any(trains)
    if any(trains):
        loss.backward()
        assert [t.grad is not None for t in (head.hidden, head.weight)] == list(trains)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_the_loss_is_fused_and_has_no_graph(mode: Callable[[], Any]) -> None:
    head = Head()
    with mode():
        loss = F.cross_entropy(head.lazy().float().view(-1, V), LABELS)
        expected = F.cross_entropy(head.stock().float().view(-1, V), LABELS)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected)
        assert head.calls.served == 1
        torch.testing.assert_close(head.lazy() + 0, head.stock())


def test_a_head_called_without_grad_stays_out_of_the_graph() -> None:
    head = Head()
    with torch.no_grad():
        logits = head.lazy()
    assert not F.cross_entropy(logits.view(-1, V), LABELS).requires_grad
    assert not (logits * 2).requires_grad
