"""Entropy and most likely word of every token, read after the loss: without logits, from the second step on free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.patching.deferred import Product
from slothplug.patching.log_probabilities import LazyLogProbabilities
from slothplug.patching.sites import Calls
from tests.architectures.step import Step
from tests.patching.architectures import IDS, LABELS, assert_same_step, tiny


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """As TRL 0.24 computes it, a few rows at a time."""
    entropies = []
    for rows in logits.reshape(-1, logits.shape[-1]).split(16):
        log_p = torch.nn.functional.log_softmax(rows, dim=-1)
        entropies.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def read(model: nn.Module) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """One step, after whose forward somebody looks at the logits as TRL's SFTTrainer does."""
    model.zero_grad()
    output = model(input_ids=IDS, labels=LABELS, use_cache=False)
    with torch.no_grad():
        entropy = entropy_from_logits(output.logits)
        words = output.logits[..., :-1, :].contiguous().argmax(dim=-1)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(output.loss.detach(), gradients), entropy, words


def assert_same(
    got: tuple[Step, torch.Tensor, torch.Tensor], expected: tuple[Step, torch.Tensor, torch.Tensor]
) -> None:
    assert_same_step(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=2e-6)
    assert torch.equal(got[2], expected[2])


def calls_of(report: slothplug.Report) -> Calls:
    [head] = report.by_op()["head"]
    return head.calls


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The hidden rows that logits were made of, outside the loss."""
    rows: list[torch.Tensor] = []
    linear = Product.linear

    def note(self: Product, hidden: torch.Tensor, u: torch.Tensor | None) -> torch.Tensor:
        rows.append(hidden)
        return linear(self, hidden, u)

    monkeypatch.setattr(Product, "linear", note)
    return rows


def test_from_the_second_step_on_no_logits_are_made(products: list[torch.Tensor]) -> None:
    model, stock = tiny("llama"), tiny("llama")
    report = slothplug.patch(model)
    expected = read(stock)
    assert_same(read(model), expected)
    assert products
    products.clear()
    for _ in range(2):
        assert_same(read(model), expected)
    assert not products
    assert (calls_of(report).served, dict(calls_of(report).fallbacks)) == (3, {})


def test_where_nobody_reads_any_more_nothing_is_written_down(products: list[torch.Tensor]) -> None:
    model = tiny("llama")
    slothplug.patch(model)
    read(model)
    written = []
    for _ in range(3):
        output = model(input_ids=IDS, labels=LABELS)
        written.append(output.logits._deferred.product.statistics is not None)
    assert written == [True, False, False]


def test_with_an_epilogue_logits_are_made_a_chunk_at_a_time(products: list[torch.Tensor]) -> None:
    """What the loss saw is not what the readers see."""
    for make in (lambda: tiny("gemma2"), lambda: tiny("cohere2")):
        model, stock = make(), make()
        report = slothplug.patch(model)
        for _ in range(3):
            products.clear()
            assert_same(read(model), read(stock))
            assert products
            assert max(rows.numel() for rows in products) < model.config.hidden_size * IDS.numel()
        assert calls_of(report).fallbacks == {}


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log p": lambda x: x.log_softmax(-1) + 0,
    "p": lambda x: x.log_softmax(-1).exp() * 2,
    "p log p": lambda x: (x.log_softmax(-1).exp() * x.log_softmax(-1)).sum(-1),
    "the other order": lambda x: (lambda y: (y * y.exp()).sum(-1))(x.log_softmax(-1)),
    "another sum": lambda x: (lambda y: (y * y.exp()).sum(0))(x.log_softmax(-1)),
    "all": lambda x: (lambda y: (y * y.exp()).sum())(x.log_softmax(-1)),
    "kept": lambda x: (lambda y: (y * y.exp()).sum(-1, keepdim=True))(x.log_softmax(-1)),
    "square": lambda x: x.log_softmax(-1).square(),
    "another dimension": lambda x: x.log_softmax(0) + 0,
    "other logits": lambda x: (x.log_softmax(-1) * (x * 2).log_softmax(-1).exp()).sum(-1),
    "gathered": lambda x: x.log_softmax(-1).gather(-1, IDS[..., None]),
    "a list": lambda x: torch.tensor(x.log_softmax(-1).tolist()),
    "cast": lambda x: (lambda y: (y * y.exp()).sum(-1))(x.float().log_softmax(-1)),
    "half": lambda x: x.half().argmax(-1),
    "written before": lambda x: (lambda y: (x.mul_(3), (y * y.exp()).sum(-1) + x.sum(-1))[1])(x.log_softmax(-1)),
    "written between": lambda x: (lambda y: (y.mul_(3), y + x)[1])(x.log_softmax(-1)),
}


@pytest.mark.parametrize("use", BETWEEN.values(), ids=BETWEEN)
def test_whatever_is_read_is_what_stock_has(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, stock = tiny("llama"), tiny("llama")
    slothplug.patch(model)
    for _ in range(2):
        found = []
        for one in (model, stock):
            output = one(input_ids=IDS, labels=LABELS)
            with torch.no_grad():
                entropy_from_logits(output.logits)  # so that the next step expects a reader
                found.append(use(output.logits) + 0)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        assert not isinstance(found[0], LazyLogProbabilities)


def test_with_a_graph_the_logits_are_real() -> None:
    model, stock = tiny("llama"), tiny("llama")
    slothplug.patch(model)
    gradients = []
    for one in (model, stock):
        output = one(input_ids=IDS, labels=LABELS)
        (output.loss + entropy_from_logits(output.logits).mean()).backward()
        gradients.append(one.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_evaluation(way: Callable[[], Any]) -> None:
    model, stock = tiny("llama").eval(), tiny("llama").eval()
    report = slothplug.patch(model)
    with way():
        for _ in range(2):
            outputs = [one(input_ids=IDS, labels=LABELS) for one in (model, stock)]
            torch.testing.assert_close(*(entropy_from_logits(output.logits) for output in outputs))
            assert torch.equal(*(output.logits.argmax(-1) for output in outputs))
    assert calls_of(report).fallbacks == {}
