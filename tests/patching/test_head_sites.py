"""Which heads are served and which are left: with adapters and hooks, of other classes, with somebody else's loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import slothplug
from slothplug.errors import NothingFusedError
from slothplug.patching.report import SiteReport
from tests.patching.device import cpu_only
from tests.patching.heads import IDS, LABELS, assert_same, head_of, lora, make, patched, step


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}],
    ids=["frozen head", "modules_to_save", "LoRA on the head"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_of_the_head_are_used_and_trained(when: str, changes: dict[str, Any], tied: bool) -> None:
    # https://github.com/huggingface/trl/issues/4612
    base, stock = make(tie_word_embeddings=tied), lora(make(tie_word_embeddings=tied), **changes)
    if when == "before":
        patched(base)
    model = lora(base, **changes)
    head = patched(model)
    assert_same(step(model), step(stock))
    assert (head.status, head.calls.served, dict(head.calls.fallbacks)) == ("fused", 1, {})
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, stock(input_ids=IDS, labels=LABELS).loss)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainable_tokens_of_a_tied_head_are_left() -> None:
    def build() -> nn.Module:
        return lora(make(tie_word_embeddings=True), trainable_token_indices={"embed_tokens": [5, 6]})

    model, stock = build(), build()
    head = patched(model)
    assert head.status == "left"
    assert "adapter is on the head" in head.reason
    assert_same(step(model), step(stock))


def test_backward_hooks_on_the_head_fire() -> None:
    model = make()
    head, seen = patched(model), []
    model.lm_head.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output))
    step(model)
    assert len(seen) == 1
    assert head.calls.fallbacks["it has backward hooks"] == 1


def test_a_forward_hook_on_the_head_may_change_the_logits() -> None:
    model, stock = make(), make()
    head = patched(model)
    for each in (model, stock):
        each.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert_same(step(model), step(stock))
    assert head.calls.served == 1


def test_an_exception_in_the_loss_is_the_callers() -> None:
    def fails(**_: Any) -> None:
        raise ValueError("mine")

    model = make()
    head = patched(model)
    model.loss_function = fails
    with pytest.raises(ValueError, match="mine"):
        model(input_ids=IDS, labels=LABELS)
    assert not head.calls.fallbacks
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    assert step(model)[0].isfinite()
    assert head.calls.served == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_trls_own_fused_head_is_left_alone(wrapped: bool) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model = make()
    utils.add_fused_lm_head(model)
    head = head_of(slothplug.patch(lora(model) if wrapped else model))
    assert head.status == "left"
    assert head.excused
    assert "TRL" in head.reason


def test_trls_fused_head_put_on_later_computes_what_it_does_in_stock() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model, stock = make(), make()
    patched(model)
    for each in (model, stock):
        utils.add_fused_lm_head(each)
    for extra in ({"fused_lm_head": True}, {}):
        assert_same(step(model, **extra), step(stock, **extra))


def patched_or_left(model: nn.Module) -> SiteReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", slothplug.NothingFusedWarning)
        return patched(model)


def test_another_head_than_a_linear_layer_is_left_with_the_reason() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model, stock = make(), make()
    for each in (model, stock):
        each.lm_head.__class__ = Scaled
    head = patched_or_left(model)
    assert head.status == "left"
    assert "not a plain linear layer" in head.reason
    assert_same(step(model), step(stock))
    with pytest.raises(NothingFusedError, match="not a plain linear layer"):
        slothplug.patch(model, {"ops": ["head"], "strict": True})


def test_a_kernel_that_computes_something_else_is_refused() -> None:
    from slothplug.patching.sites import Kernel

    class Plugin:
        @slothplug.hookimpl
        def slothplug_kernel(self, operation: str, device: Any, dtype: Any, settings: Any) -> Kernel | None:
            def wrong(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
                return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")  # no epilogue

            return Kernel("forgets the epilogue", "torch", wrong) if operation == "head" else None

    plugin = Plugin()
    slothplug.plugin_manager().register(plugin)
    try:
        head = patched_or_left(make())
    finally:
        slothplug.plugin_manager().unregister(plugin)
    assert head.status == "left"
    assert "mul" in head.reason


def test_copies_and_undo() -> None:
    model, stock = make(), make()
    report = slothplug.patch(model, {"ops": ["head"]})
    duplicate = copy.deepcopy(model)
    assert_same(step(duplicate), step(stock))
    report.undo()
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


def glora(model: nn.Module) -> bool:
    """Whether PEFT's GLoRA took the head as a target."""
    config = peft.GloraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"])
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError:  # "GLoRA does not support this layer type"
        return False
    return any("lm_head.glora" in name for name, _ in adapted.named_parameters())


def quantized(model: nn.Module) -> bool:
    """Whether torch's dynamic quantisation converted the head."""
    converted = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return not isinstance(converted.lm_head, nn.Linear)


BY_CLASS = [
    pytest.param(
        glora, marks=pytest.mark.skipif(not hasattr(peft, "GloraConfig"), reason="this PEFT has no GLoRA"), id="GLoRA"
    ),
    pytest.param(quantized, marks=cpu_only, id="quantize_dynamic"),
]


@pytest.mark.parametrize("finds_the_head", BY_CLASS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_code_that_looks_a_class_up_finds_the_head_after_undo(finds_the_head: Callable[[nn.Module], bool]) -> None:
    """docs/huggingface.md, "What a patched model does not see", says that it does not before."""
    model = make()
    slothplug.patch(model)
    assert not finds_the_head(model)
    model = make()
    slothplug.patch(model).undo()
    assert finds_the_head(model)
    model = make()
    with slothplug.fast_kernels(model):
        step(model)
    assert finds_the_head(model)
