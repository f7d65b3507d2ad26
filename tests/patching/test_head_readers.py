"""Who reads the logits of whole models gets stock's, or hears that they are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import slothplug
from slothplug.errors import StaleLogitsError
from slothplug.ops.head.staleness import _BeforeSteps
from tests.patching.device import DEVICE
from tests.patching.heads import IDS, LABELS, assert_same, head_of, make, patched


def test_what_leaves_the_model_is_the_logits() -> None:
    # https://github.com/unslothai/unsloth/issues/3126
    model, stock = make(), make()
    head = patched(model)
    output, expected = model(input_ids=IDS, labels=LABELS), stock(input_ids=IDS, labels=LABELS)
    assert isinstance(output.logits, torch.Tensor)
    assert output.logits.shape == (2, 24, 128)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert not head.calls.fallbacks
    for loss in (output.loss + output.logits.square().mean(), expected.loss + expected.logits.square().mean()):
        loss.backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(output.logits + 0, expected.logits)
    assert dict(head.calls.fallbacks) == {"logits were read by pow": 1}


def test_without_labels_the_head_is_stock() -> None:
    model, stock = make(), make()
    head = patched(model)
    logits = model(input_ids=IDS).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, stock(input_ids=IDS).logits)
    assert torch.equal(
        model.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
        stock.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
    )
    assert head.calls.served == 0
    assert set(head.calls.fallbacks) == {"called without labels"}


def test_a_loss_function_that_reads_is_stock_and_real_when_the_call_ends() -> None:
    def reader(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean()

    def nothing(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)

    for function in (reader, nothing):
        model, stock = make(), make()
        model.loss_function = stock.loss_function = function
        head = patched(model)
        results = []
        for each in (model, stock):
            with torch.autocast(DEVICE, torch.bfloat16):
                output = each(input_ids=IDS, labels=LABELS)
            results.append(output)
            assert head.calls.served == 0
            assert head.calls.fallbacks.total() == 1
            (output.loss + output.logits.float().exp().mean()).backward()
        assert torch.equal(results[0].loss, results[1].loss)
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], Any]) -> None:
    # https://github.com/huggingface/trl/pull/5069
    model, stock = make().eval(), make().eval()
    head = patched(model)
    with mode():
        got, expected = model(input_ids=IDS, labels=LABELS), stock(input_ids=IDS, labels=LABELS)
        torch.testing.assert_close(got.loss, expected.loss)
        assert head.calls.served == 1
        assert not head.calls.fallbacks
        assert not got.loss.requires_grad
        assert torch.equal(got.logits + 0, expected.logits)


def test_reading_after_the_head_was_trained_is_refused() -> None:
    model = make()
    patched(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    output = model(input_ids=IDS, labels=LABELS)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        output.logits.softmax(-1)


def hooks_before_steps() -> list[Any]:
    return [hook for hook in _global_optimizer_pre_hooks.values() if isinstance(hook, _BeforeSteps)]


def test_the_hook_on_optimizer_steps_serves_an_undone_model_and_holds_none() -> None:
    model = make()
    report = slothplug.patch(model)
    output = model(input_ids=IDS, labels=LABELS)
    report.undo()
    (hook,) = hooks_before_steps()
    output.loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer.step()
    with pytest.raises(StaleLogitsError, match="an optimizer stepped"):
        output.logits.softmax(-1)
    undone = weakref.ref(model)
    weight = weakref.ref(model.lm_head.weight)
    del model, report, output, optimizer
    gc.collect()
    assert undone() is None
    assert weight() is None
    another = make()
    slothplug.patch(another)
    another(input_ids=IDS, labels=LABELS)
    assert hooks_before_steps() == [hook]


def test_keep_logits_leaves_the_head_as_it_is() -> None:
    model = make()
    report = slothplug.patch(model, {"keep_logits": True, "strict": True})
    assert (head_of(report).status, head_of(report).reason) == ("left", "keep_logits is set")
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


def test_a_compiled_reader_of_the_logits() -> None:
    model, stock = make(num_hidden_layers=1), make(num_hidden_layers=1)
    patched(model)
    read = torch.compile(lambda logits: logits.log_softmax(-1).square().mean(), backend="eager")
    results = []
    for each in (model, stock):
        value = read(each(input_ids=IDS, labels=LABELS).logits)
        value.backward()
        results.append((value.detach(), {name: p.grad for name, p in each.named_parameters()}))
    assert_same(*results)
