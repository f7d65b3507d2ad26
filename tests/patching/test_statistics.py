"""Entropy and most likely token of every token, read after the loss: recorded by it where a reader was declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slothplug
from slothplug.kernels.cross_entropy import RowStatistics
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.ops.head import record_statistics, statistics_policy
from slothplug.ops.head.head_call import HeadCall
from slothplug.patching.served import STATE, Calls
from tests.architectures.step import Step
from tests.patching.architectures import IDS, LABELS, assert_same_step, tiny
from tests.patching.device import DEVICE


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
        tokens = output.logits[..., :-1, :].contiguous().argmax(dim=-1)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(output.loss.detach(), gradients), entropy, tokens


def assert_same(
    got: tuple[Step, torch.Tensor, torch.Tensor],
    expected: tuple[Step, torch.Tensor, torch.Tensor],
    architecture: str | None = None,
) -> None:
    assert_same_step(got[0], expected[0], architecture)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=2e-6)
    assert torch.equal(got[2], expected[2])


def calls_of(report: slothplug.Report) -> Calls:
    [head] = report.by_op()["head"]
    return head.calls


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The hidden rows that logits were made of, outside the loss."""
    rows: list[torch.Tensor] = []
    linear = HeadCall.linear

    def note(self: HeadCall, hidden: torch.Tensor, u: torch.Tensor | None) -> torch.Tensor:
        rows.append(hidden)
        return linear(self, hidden, u)

    monkeypatch.setattr(HeadCall, "linear", note)
    return rows


def words_of(report: slothplug.Report) -> str:
    return " ".join(str(report).split())


def patched(model: nn.Module, **settings: Any) -> slothplug.Report:
    """A model whose trainer is known to read entropy and argmax."""
    report = slothplug.patch(model, settings or True)
    assert record_statistics(model) == []
    return report


def test_with_a_declared_reader_no_logits_are_made(products: list[torch.Tensor]) -> None:
    model, stock = tiny("llama"), tiny("llama")
    report = patched(model)
    expected = read(stock)
    for _ in range(2):
        assert_same(read(model), expected)
    assert not products
    calls = calls_of(report)
    assert (calls.served, dict(calls.fallbacks), dict(calls.remarks)) == (2, {}, {})


def test_without_a_declaration_logits_are_made_a_chunk_at_a_time_and_the_report_says_so(
    products: list[torch.Tensor],
) -> None:
    model, stock = tiny("llama"), tiny("llama")
    report = slothplug.patch(model)
    expected = read(stock)
    for _ in range(2):
        assert_same(read(model), expected)
    assert products
    calls = calls_of(report)
    assert (calls.served, dict(calls.fallbacks)) == (2, {})
    assert list(calls.remarks.values()) == [2], "once a call"
    assert "no trainer that reads them was declared (slothplug.ops.head.record_statistics)" in words_of(report)


def test_nothing_is_compared_during_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison waits for the device."""
    model = tiny("llama")
    patched(model)
    monkeypatch.delattr(statistics_policy, "_why_not_recorded_by")
    for _ in range(3):
        read(model)


def test_if_nobody_reads_one_losss_statistics_later_losses_stop_recording(products: list[torch.Tensor]) -> None:
    model = tiny("llama")
    report = patched(model)
    read(model)
    recorded = []
    for _ in range(3):
        output = model(input_ids=IDS, labels=LABELS)
        recorded.append(output.logits._value.call.statistics is not None)
    assert recorded == [True, False, False]
    assert_same(read(model), read(tiny("llama")))
    assert "an earlier loss recorded them and nobody read them" in words_of(report)


def test_with_an_epilogue_logits_are_made_for_the_readers(products: list[torch.Tensor]) -> None:
    """What the loss saw is not what the readers see."""
    for architecture in ("gemma2", "cohere2"):
        model, stock = tiny(architecture), tiny(architecture)
        report = patched(model)
        for _ in range(3):
            products.clear()
            assert_same(read(model), read(stock), architecture)
            assert products
            assert max(rows.numel() for rows in products) < model.config.hidden_size * IDS.numel()
        assert calls_of(report).fallbacks == {}


def test_what_a_reader_gets_is_its_own() -> None:
    model, stock = tiny("llama"), tiny("llama")
    patched(model)
    for _ in range(3):
        for one in (model, stock):
            output = one(input_ids=IDS, labels=LABELS)
            with torch.no_grad():
                entropy, tokens = entropy_from_logits(output.logits), output.logits.argmax(-1)
                kept = entropy.clone(), tokens.clone()
                entropy.zero_(), tokens.zero_()
                assert torch.equal(output.logits.argmax(-1), kept[1])
                assert torch.equal(entropy_from_logits(output.logits), kept[0])


def test_what_a_reader_gets_is_an_ordinary_tensor_in_inference_mode_too() -> None:
    model = tiny("llama")
    patched(model)
    for _ in range(3):
        with torch.inference_mode():
            logits = model(input_ids=IDS, labels=LABELS).logits
        tokens = logits[:, :-1].argmax(-1)
        assert tokens.view(-1).shape == (38,)  # dense
        tokens[0, 0] = 3
        with pytest.raises(IndexError):
            logits.argmax(3)
        with pytest.raises(IndexError):
            logits.log_softmax(-4)


def test_a_loss_that_raises_writes_nothing_down() -> None:
    model, stock = tiny("llama"), tiny("llama")
    patched(model)
    read(model)
    tokens = []
    for one in (model, stock):
        kept: list[torch.Tensor] = []

        def loss(logits: torch.Tensor, kept: list[torch.Tensor] = kept, **_: Any) -> torch.Tensor:
            kept.append(logits)
            with pytest.raises(ValueError, match="Expected input batch_size"):
                F.cross_entropy(logits.float().view(-1, logits.shape[-1]), LABELS.view(-1)[1:])
            rows = logits.float().view(-1, logits.shape[-1])
            with pytest.raises(RuntimeError):
                F.cross_entropy(rows, LABELS.view(-1), weight=torch.ones(3, device=rows.device))
            return kept[0].argmax(-1).sum()

        one.loss_function = loss
        tokens.append(one(input_ids=IDS, labels=LABELS).loss)
    assert torch.equal(*tokens)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
def test_the_whole_model_in_a_checkpoint(reads: bool) -> None:
    """What the second forward saves must be what the first did."""
    labels = IDS.where(torch.rand(IDS.shape, generator=torch.Generator(DEVICE).manual_seed(0)) < 0.5, -100)
    labels[:, 0] = IDS[:, 0]  # counted at the call, and shifted away before the loss
    model, stock = tiny("llama"), tiny("llama")
    patched(model)

    def run(one: nn.Module) -> Step:
        one.zero_grad()

        def forward(ids: torch.Tensor) -> Any:
            output = one(input_ids=ids, labels=labels, use_cache=False)
            return output.loss, output.logits

        loss, logits = torch.utils.checkpoint.checkpoint(forward, IDS, use_reentrant=False)
        if reads:
            with torch.no_grad():
                logits.argmax(-1), entropy_from_logits(logits)
        loss.backward()
        return Step(loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None})

    for _ in range(4):
        assert_same_step(run(model), run(stock))


def test_float64_is_read_in_float64() -> None:
    model, stock = tiny("llama").double(), tiny("llama").double()
    with torch.no_grad():
        for one in (model, stock):
            one.lm_head.bias = nn.Parameter(torch.full((one.config.vocab_size,), 1e6, dtype=torch.float64))
    report = slothplug.patch(model, {"ops": ["head"], "verify": False})
    [note] = record_statistics(model)
    assert "float64" in note
    for _ in range(2):
        torch.testing.assert_close(read(model)[1], read(stock)[1], rtol=1e-9, atol=1e-9)
    assert calls_of(report).served == 2


def test_two_losses_of_one_call(products: list[torch.Tensor]) -> None:
    """Only the first records; the second changes none of it."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        rows, targets = logits.float().view(-1, vocab_size), labels.view(-1)
        return F.cross_entropy(rows, targets) + F.cross_entropy(rows, targets.roll(-1))

    model, stock = tiny("llama"), tiny("llama")
    report = patched(model)
    model.loss_function = stock.loss_function = loss
    for _ in range(3):
        products.clear()
        assert_same(read(model), read(stock))
    assert not products
    assert (calls_of(report).served, dict(calls_of(report).fallbacks)) == (6, {})


@pytest.mark.parametrize("way", ["pure", "autocast"])
def test_in_bfloat16(way: str) -> None:
    """As TRL trains: no further from the entropy of the bfloat16 logits, in float64, than stock is."""
    model, stock = (tiny("llama").to(torch.bfloat16 if way == "pure" else torch.float32) for _ in range(2))
    report = patched(model, ops=["head"])
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=way == "autocast"):
            ours, theirs = read(model), read(stock)
            with torch.no_grad():
                logits = stock(input_ids=IDS).logits
        exact = entropy_from_logits(logits.double())
        assert (ours[1] - exact).norm() <= (theirs[1] - exact).norm()
        assert torch.equal(ours[2], theirs[2])
    assert calls_of(report).fallbacks == {}


def test_a_sum_in_float32(products: list[torch.Tensor]) -> None:
    """What autocast makes of ``sum`` on a GPU."""
    model, stock = tiny("llama").bfloat16(), tiny("llama").bfloat16()
    patched(model, ops=["head"])
    for _ in range(2):
        products.clear()
        found = []
        for one in (model, stock):
            with torch.no_grad():
                logits = one(input_ids=IDS, labels=LABELS).logits
                log_p = logits.log_softmax(-1)
                found.append(-(log_p.exp() * log_p).sum(-1, dtype=torch.float32))
        exact = entropy_from_logits(logits.double())
        assert found[0].dtype is torch.float32
        assert (found[0] - exact).norm() <= (found[1] - exact).norm()
    assert not products


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("takes none", "cannot record them in torch.float32"), ("records another token", "records another token")],
)
def test_a_kernel_that_cannot_is_not_asked(fault: str, reason: str, products: list[torch.Tensor]) -> None:
    """A plugin's, say. Its readers are answered a chunk at a time."""

    def kernel(*operands: torch.Tensor, statistics: RowStatistics | None = None, **options: Any) -> torch.Tensor:
        if statistics is not None and fault == "takes none":
            raise TypeError("unexpected keyword argument 'statistics'")
        loss = linear_cross_entropy(*operands, statistics=statistics, **options)
        if statistics is not None:
            statistics.argmax[-1] += 1
        return loss

    model, stock = tiny("llama"), tiny("llama")
    report = slothplug.patch(model)
    model.lm_head.__dict__[STATE].kernel = kernel
    [note] = record_statistics(model)
    assert reason in note
    for _ in range(3):
        products.clear()
        assert_same(read(model), read(stock))
        assert products
    assert (calls_of(report).served, dict(calls_of(report).fallbacks)) == (3, {})
    assert reason in words_of(report)


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
    "summed in float64": lambda x: (lambda y: (y * y.exp()).sum(-1, dtype=torch.float64))(x.log_softmax(-1)),
    "cast": lambda x: (lambda y: (y * y.exp()).sum(-1))(x.float().log_softmax(-1)),
    "half": lambda x: x.half().argmax(-1),
    "written before": lambda x: (lambda y: (x.mul_(3), (y * y.exp()).sum(-1) + x.sum(-1))[1])(x.log_softmax(-1)),
    "written between": lambda x: (lambda y: (y.mul_(3), y + x)[1])(x.log_softmax(-1)),
}


@pytest.mark.parametrize("use", BETWEEN.values(), ids=BETWEEN)
def test_whatever_is_read_is_what_stock_has(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, stock = tiny("llama"), tiny("llama")
    patched(model)
    for _ in range(2):
        found = []
        for one in (model, stock):
            output = one(input_ids=IDS, labels=LABELS)
            with torch.no_grad():
                entropy_from_logits(output.logits)  # so that the next loss records too
                found.append(use(output.logits) + 0)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_with_a_graph_the_logits_are_real() -> None:
    model, stock = tiny("llama"), tiny("llama")
    patched(model)
    gradients = []
    for one in (model, stock):
        output = one(input_ids=IDS, labels=LABELS)
        (output.loss + entropy_from_logits(output.logits).mean()).backward()
        gradients.append(one.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_evaluation(way: Callable[[], Any]) -> None:
    model, stock = tiny("llama").eval(), tiny("llama").eval()
    report = patched(model)
    with way():
        for _ in range(2):
            outputs = [one(input_ids=IDS, labels=LABELS) for one in (model, stock)]
            torch.testing.assert_close(*(entropy_from_logits(output.logits) for output in outputs))
            assert torch.equal(*(output.logits.argmax(-1) for output in outputs))
    assert calls_of(report).fallbacks == {}
