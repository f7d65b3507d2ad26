"""An adapted head between calls: other adapters, hooks, merges, shards and copies; and logits read too late."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import slothplug
from slothplug.errors import StaleLogitsError
from slothplug.kernels.linear_cross_entropy import LowRank, linear_cross_entropy
from slothplug.patching.private_class import is_patched
from slothplug.patching.sites import Kernel
from tests.patching.adapted_heads import build, pair
from tests.patching.heads import IDS, LABELS, assert_same, head_of, step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], Any]) -> None:
    model, stock, head = pair(lora_dropout=0.5)
    model.eval()
    stock.eval()
    with mode():
        ours, theirs = model(input_ids=IDS, labels=LABELS), stock(input_ids=IDS, labels=LABELS)
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert (head.calls.served, dict(head.calls.fallbacks)) == (1, {})
        assert torch.equal(ours.logits + 0, theirs.logits)
        assert torch.equal(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    assert head.calls.fallbacks["called without labels"] == 1


def test_the_state_of_the_adapter_is_asked_for_on_every_call() -> None:
    # https://github.com/huggingface/peft/issues/493
    model, stock, head = pair()
    assert_same(step(model), step(stock))
    other = peft.LoraConfig(r=2, lora_alpha=7, target_modules=["lm_head"], init_lora_weights=False)
    dora = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, use_dora=True)
    for one in (model, stock):
        torch.manual_seed(5)
        one.add_adapter("other", other)
        one.add_adapter("dora", dora)

    def outcome(seen: Any, reason: str | None) -> None:
        served = head.calls.served
        head.calls.fallbacks.clear()
        torch.testing.assert_close(seen(model), seen(stock), rtol=1e-5, atol=1e-5)
        assert head.calls.served == served + (reason is None)
        assert list(head.calls.fallbacks) == ([] if reason is None else [reason])

    def loss(one: Any) -> torch.Tensor:
        return one(input_ids=IDS, labels=LABELS).loss.detach()

    def disabled(one: Any) -> torch.Tensor:
        with one.disable_adapter():
            return loss(one)

    losses = {}
    for active, reason in (
        ("other", None),
        (["default", "other"], "several adapters are active"),
        ("dora", "the adapter is no plain LoRA (DoraLinearVariant)"),
        ("default", None),
    ):
        for one in (model, stock):
            one.base_model.set_adapter(active)
        outcome(loss, reason)
        outcome(disabled, None)
        losses[str(active)] = loss(stock)
    assert len({round(value.item(), 3) for value in losses.values()}) == 4
    for one in (model, stock):
        one.base_model.model.lm_head.scale_layer(3.0)
    outcome(loss, None)
    for one in (model, stock):
        one.merge_adapter()
    outcome(loss, "the adapter is merged")
    outcome(disabled, "adapters are disabled")  # PEFT unmerges
    outcome(loss, None)
    assert_same(step(model), step(stock))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "an adapter is on the head, and its adapter is no plain LoRA (DoraLinearVariant)"),
    "bias of B": ({"lora_bias": True}, "an adapter is on the head, and its second layer has a bias"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_adapters_are_answered_by_peft(changes: dict[str, Any], reason: str) -> None:
    model, stock = build(**changes), build(**changes)
    report = slothplug.patch(model, {"ops": ["head", "rms_norm"]})
    assert (head_of(report).status, head_of(report).reason) == ("left", reason)
    assert_same(step(model), step(stock))


def test_a_bias_that_the_adapter_got_later_is_answered_by_peft() -> None:
    model, stock, head = pair()
    for one in (model, stock):
        torch.manual_seed(7)
        one.base_model.model.lm_head.lora_B["default"].bias = nn.Parameter(torch.randn(128))
    assert_same(step(model), step(stock))
    assert dict(head.calls.fallbacks) == {"the adapter's second layer has a bias": 1}


def test_hooks_on_the_head_fire_and_it_is_served() -> None:
    model, stock, head = pair()
    for one in (model, stock):
        layer = one.base_model.model.lm_head
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        layer.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert_same(step(model), step(stock))
    assert (head.calls.served, dict(head.calls.fallbacks)) == (1, {})
    for one in (model, stock):
        one.base_model.model.lm_head.register_full_backward_hook(lambda module, of_input, of_output: None)
    assert_same(step(model), step(stock))
    assert dict(head.calls.fallbacks) == {"it has backward hooks": 1}


def test_hooks_on_its_parts_fire() -> None:
    model, stock, head = pair()
    for one in (model, stock):
        part = one.base_model.model.lm_head.lora_A["default"]
        part.register_forward_hook(lambda module, inputs, output: output * 2)
    assert_same(step(model), step(stock))
    assert dict(head.calls.fallbacks) == {"it or a part of it has hooks, or a forward set by somebody else": 1}


def test_reading_after_the_adapter_was_trained_is_refused() -> None:
    model, _, _ = pair()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    outputs = [model(input_ids=IDS, labels=LABELS) for _ in range(2)]
    outputs[0].loss.backward()
    optimizer.step()
    with pytest.raises(StaleLogitsError, match="an optimizer stepped"):
        outputs[0].logits.softmax(-1)
    output = model(input_ids=IDS, labels=LABELS)
    with torch.no_grad():
        model.base_model.model.lm_head.lora_B["default"].weight.mul_(2)
    with pytest.raises(StaleLogitsError, match="written"):
        output.logits.softmax(-1)


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_reading_after_a_merge_is_refused(merge: str, disabled: bool) -> None:
    """PEFT merges through ``.data``, which leaves no trace in the weight: the adapter would count twice."""
    model, _, _ = pair()
    with model.disable_adapter() if disabled else contextlib.nullcontext():
        output = model(input_ids=IDS, labels=LABELS)
    getattr(model, merge)()
    with pytest.raises(StaleLogitsError, match="written or replaced"):
        output.logits.argmax(-1)


def test_a_scaling_of_0_hides_no_nan() -> None:
    model, stock, head = pair()
    for one in (model, stock):
        layer = one.base_model.model.lm_head
        layer.scaling["default"] = 0.0
        with torch.no_grad():
            layer.lora_B["default"].weight[0, 0] = torch.nan
    losses = [one(input_ids=IDS, labels=LABELS).loss for one in (model, stock)]
    assert losses[0].isnan().item() == losses[1].isnan().item()
    assert head.calls.fallbacks == {"the adapter's scaling is 0": 1}


@pytest.mark.parametrize("fault", ["drops the adapter", "forgets the scaling", "starves B"])
def test_a_kernel_that_computes_something_else_is_refused(fault: str) -> None:
    class Plugin:
        @slothplug.hookimpl
        def slothplug_kernel(self, operation: str, device: Any, dtype: Any, settings: Any) -> Kernel | None:
            def wrong(*args: Any, low_rank: LowRank, **options: Any) -> torch.Tensor:
                changed: LowRank | None = low_rank._replace(scaling=1.0)
                if fault == "drops the adapter":
                    changed = None
                elif fault == "starves B":
                    changed = low_rank._replace(b=low_rank.b.detach() + 0 * low_rank.b)
                return linear_cross_entropy(*args, low_rank=changed, **options)

            return Kernel(fault, "torch", wrong) if operation == "head" else None

    plugin = Plugin()
    slothplug.plugin_manager().register(plugin)
    try:
        model = build()
        head = head_of(slothplug.patch(model, {"ops": ["head", "rms_norm"]}))
    finally:
        slothplug.plugin_manager().unregister(plugin)
    assert head.status == "left"
    assert head.reason.startswith(f"kernel {fault}: ")
    assert ("gradient" in head.reason) == (fault == "starves B")


@pytest.mark.parametrize(
    ("own_unit", "served"), [(None, 1), (False, 1), (True, 0)], ids=["root's", "kept whole", "freed after its call"]
)
def test_fsdp2(process_group: None, own_unit: bool | None, served: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model, stock, head = pair()
    inner = model.base_model.model
    if own_unit is not None:
        fully_shard([inner.model.norm, inner.lm_head], reshard_after_forward=own_unit)
    fully_shard(model)
    loss, gradients = step(model)
    assert_same((loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}), step(stock))
    assert head.status == "fused"
    assert head.calls.served == served
    assert dict(head.calls.fallbacks) == ({} if served else {"its weights are freed when its call ends": 1})


def test_copies_and_undo() -> None:
    model, stock = build(), build()
    report = slothplug.patch(model, {"ops": ["head"]})
    duplicate = copy.deepcopy(model)
    expected = step(stock)
    assert_same(step(duplicate), expected)
    assert head_of(report).calls.served == 1
    report.undo()
    assert not any(is_patched(module) for module in model.modules())
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor
    assert_same(step(model), expected)
