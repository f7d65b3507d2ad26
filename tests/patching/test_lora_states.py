"""What a LoRA layer's call must ask for each time, and the layers that are left to PEFT."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import slothplug
from tests.patching.lora_models import IDS, LAYERS, assert_equal, fallbacks, layer, logits, model, pair, patch, step

VARIANTS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "aLoRA": {"alora_invocation_tokens": [4], "task_type": "CAUSAL_LM"},
}
if "use_bdlora" in LoraConfig.__dataclass_fields__:
    from peft.tuners.lora.config import BdLoraConfig, VeloraConfig

    VARIANTS |= {
        "VeLoRA": {"velora_config": VeloraConfig()},
        "BD-LoRA": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], nblocks=2)},
    }


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_other_kinds_of_adapters_are_left(config: dict[str, Any]) -> None:
    # https://github.com/unslothai/unsloth-zoo/pull/954
    fast = model(target_modules=["q_proj", "v_proj"], **config)
    classes = {type(module) for module in fast.modules()}
    with pytest.warns(slothplug.errors.NothingFusedWarning):
        report = patch(fast)
    assert {site.excused for site in report.left} == {True}
    assert all("no plain LoRA" in site.reason for site in report.left)
    assert {type(module) for module in fast.modules()} == classes


def test_a_variant_that_becomes_active_later_is_not_taken_for_plain_lora() -> None:
    fast, stock, report = pair(target_modules=["q_proj", "v_proj"])
    for one in (fast, stock):
        torch.manual_seed(1)
        one.add_adapter(
            "dora", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True, init_lora_weights=False)
        )
        one.set_adapter("dora")
    assert_equal(step(fast), step(stock), 0.0)
    assert list(fallbacks(report)) == ["the adapter is no plain LoRA (DoraLinearVariant)"]
    for one in (fast, stock):
        one.set_adapter("default")
    assert_equal(step(fast), step(stock))


def test_disabled_adapters_are_the_base_model_in_every_nesting() -> None:
    # https://github.com/huggingface/peft/issues/493
    fast, stock, report = pair("qwen2", modules_to_save=["lm_head"])
    with torch.no_grad():
        for one in (fast, stock):
            one.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    outside = logits(fast)
    with stock.disable_adapter():
        base = logits(stock)
    assert not torch.allclose(base, outside, atol=1e-3)
    with fast.disable_adapter():
        assert torch.equal(logits(fast), base)
        with fast.disable_adapter():
            assert torch.equal(logits(fast), base)
    assert torch.equal(logits(fast), outside)
    with pytest.raises(RuntimeError, match="inside"), fast.disable_adapter():
        raise RuntimeError("inside")
    assert torch.equal(logits(fast), outside)
    assert list(fallbacks(report)) == ["adapters are disabled"]
    assert_equal(step(fast), step(stock))


def test_merging_and_unmerging_count_the_delta_once() -> None:
    # https://github.com/huggingface/peft/issues/2321
    fast, stock, report = pair("qwen2")
    before = logits(fast)
    for one in (fast, stock):
        one.merge_adapter()
    assert torch.equal(logits(fast), logits(stock))
    torch.testing.assert_close(logits(fast), before, rtol=1e-4, atol=1e-5)
    assert list(fallbacks(report)) == ["the adapter is merged"]
    for one in (fast, stock):
        one.unmerge_adapter()
    torch.testing.assert_close(logits(fast), before, rtol=1e-4, atol=1e-5)
    assert_equal(step(fast), step(stock))
    merged = [one.merge_and_unload() for one in (fast, stock)]
    assert torch.equal(logits(merged[0]), logits(merged[1]))
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in merged[0].modules())


def test_several_adapters_and_switching_between_them() -> None:
    fast, stock, report = pair(target_modules=["q_proj", "k_proj", "v_proj"])
    other = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    for one in (fast, stock):
        torch.manual_seed(1)
        one.add_adapter("other", other)
    for active, reason in (
        ("default", None),
        ("other", "no adapter is active"),  # on k_proj
        (["default", "other"], "several adapters are active"),
        (["other"], "no adapter is active"),
        ("default", None),
    ):
        for one in (fast, stock):
            one.base_model.set_adapter(active)
        for site in report.fused:
            site.calls.fallbacks.clear()
        assert_equal(step(fast), step(stock))
        assert set(fallbacks(report)) == ({reason} if reason else set()), active
    # The adapter brought a layer that no patch knows yet; a second patch serves it and leaves the others as they are.
    again = patch(fast)
    assert len(again.fused) == LAYERS * 4
    assert_equal(step(fast), step(stock))


def test_scaling_is_read_on_every_call() -> None:
    fast, stock, _ = pair()
    for one in (fast, stock):
        for module in one.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.scale_layer(3.0)
    assert_equal(step(fast), step(stock))


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "non-reentrant", "reentrant"])
def test_hooks_fire_as_often_as_in_peft(checkpointing: bool | None) -> None:
    # https://github.com/huggingface/peft/issues/2826
    fast, stock, report = pair()
    counts = []
    for one in (fast, stock):
        seen = {"pre": 0, "forward": 0, "part": 0}
        counts.append(seen)

        def add_one(module: nn.Module, args: Any, seen: dict[str, int] = seen) -> Any:
            seen["pre"] += 1
            return (args[0] + 1, *args[1:])

        def count(module: nn.Module, *_: Any, seen: dict[str, int] = seen) -> None:
            seen["forward"] += 1

        def count_part(module: nn.Module, *_: Any, seen: dict[str, int] = seen) -> None:
            seen["part"] += 1

        layer(one, "layers.0.self_attn.q_proj").register_forward_pre_hook(add_one)
        layer(one, "layers.0.mlp.up_proj").register_forward_hook(count)
        layer(one, "layers.1.self_attn.v_proj").lora_A["default"].register_forward_hook(count_part)
        layer(one, "layers.1.mlp.down_proj").base_layer.register_forward_hook(count_part)
        if checkpointing is not None:
            one.enable_input_require_grads()
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    assert_equal(step(fast), step(stock))
    assert counts[0] == counts[1]
    assert all(counts[0].values())
    assert list(fallbacks(report)) == ["it or a part of it has hooks, or a forward set by somebody else"]


def test_mixed_batches_are_answered_by_peft() -> None:
    fast, stock, report = pair(target_modules=["q_proj", "v_proj"])
    names = ["default", "__base__", "default"]
    outputs = []
    for one in (fast, stock):
        one.eval()
        with torch.no_grad():
            outputs.append(one(input_ids=IDS, adapter_names=names).logits)
    assert torch.equal(*outputs)
    assert sum(fallbacks(report).values()) == LAYERS * 2


def test_inputs_of_other_types_are_answered_by_peft() -> None:
    class Odd(torch.Tensor):
        pass

    fast, stock, report = pair()
    x = torch.randn(2, 32)
    outputs = [layer(one, "q_proj")(x.as_subclass(Odd)) for one in (fast, stock)]
    assert type(outputs[0]) is Odd
    assert torch.equal(*outputs)
    assert fallbacks(report) == {"input of type Odd": 1}


def test_base_layers_of_other_classes_are_left() -> None:
    # https://github.com/unslothai/unsloth/issues/2898
    class Linear8bit(nn.Linear):
        pass

    fast = model()
    for module in list(fast.modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer) and module is not layer(fast, "layers.0.self_attn.q_proj"):
            module.base_layer.__class__ = Linear8bit
    report = patch(fast)
    assert [site.name for site in report.fused] == ["model.layers.0.self_attn.q_proj"]
    assert {(site.reason, site.excused) for site in report.left} == {
        ("its base layer is a Linear8bit; only nn.Linear and bitsandbytes' 4-bit layers are fused", True)
    }


def test_transposed_weights_are_left() -> None:
    base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=61, n_positions=16))
    fast = get_peft_model(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.warns(slothplug.errors.NothingFusedWarning):
        report = patch(fast)
    assert [site.reason for site in report.left] == [
        "its base layer is a Conv1D; only nn.Linear and bitsandbytes' 4-bit layers are fused"
    ]


def test_an_output_layer_patched_before_peft_wrapped_it() -> None:
    fast = model().merge_and_unload()
    stock = copy.deepcopy(fast)
    slothplug.patch(fast, {"ops": ["head", "lora"]})
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    outcomes = []
    for one in (fast, stock):
        torch.manual_seed(1)
        outcomes.append(get_peft_model(one, config))
    adapted, stock = outcomes
    report = slothplug.patch(adapted, {"ops": ["head", "lora"]})
    assert {site.op: site.status for site in report.sites} == {"head": "fused", "lora": "left"}
    assert_equal(step(adapted), step(stock))
    assert report.fused[0].calls.served == 1


@pytest.mark.parametrize("alone", [False, True], ids=["in the model", "by itself"])
def test_another_forward_of_pefts_class_is_called(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _, report = pair(target_modules=["q_proj"])
    q, x = layer(fast, "layers.0.self_attn.q_proj"), torch.randn(2, 3, 32)
    call = (lambda: q(x)) if alone else (lambda: fast(input_ids=IDS).logits)
    before = call()
    served = sum(site.calls.served for site in report.fused)
    with monkeypatch.context() as context:
        plain = peft.tuners.lora.layer.Linear.forward
        context.setattr(peft.tuners.lora.layer.Linear, "forward", lambda self, x, *args, **kw: plain(self, x) + 1)
        assert not torch.equal(call(), before)
        assert list(fallbacks(report)) == ["its class's forward was replaced after the patch"]
        lora = [site for site in report.fused if site.op == "lora"]
        assert sum(site.calls.fallbacks.total() for site in lora) == (1 if alone else LAYERS)
    assert torch.equal(call(), before)
    assert sum(site.calls.served for site in report.fused) > served
