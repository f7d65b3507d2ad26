"""Fused LoRA layers in real PEFT models: the same losses and gradients as PEFT's own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.kernels.lora import Dtypes, lora_linear
from slothplug.ops import lora
from slothplug.patching.sites import Kernel
from slothplug.plugins import plugin_manager
from tests.backward_calls import count_backward
from tests.patching.lora_models import (
    IDS,
    LAYERS,
    PROJECTIONS,
    assert_equal,
    fallbacks,
    layer,
    model,
    pair,
    patch,
    step,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank and alpha patterns": {"rank_pattern": {"k_proj": 2, "up_proj": 9}, "alpha_pattern": {"v_proj": 3}},
    "bias of B": {"lora_bias": True},
    "biases of LoRA layers trained": {"bias": "lora_only"},
    "all biases trained": {"bias": "all"},
    "q and v only": {"target_modules": ["q_proj", "v_proj"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_losses_and_gradients_are_pefts_and_every_layer_ran_fused(kind: str, config: dict[str, Any]) -> None:
    fast, stock, report = pair(kind, **config)
    count_backward(report)
    assert_equal(step(fast), step(stock))
    assert not report.left
    assert len(report.fused) == LAYERS * len(config.get("target_modules", PROJECTIONS))
    assert {(site.calls.served, site.calls.backward) for site in report.fused} == {(1, 1)}
    assert not fallbacks(report)
    assert fast.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_train_generate_train_with_float32_adapters(dtype: torch.dtype, autocast: bool) -> None:
    # https://github.com/unslothai/unsloth/issues/212
    fast, stock, report = pair("qwen2", dtype)
    low = autocast or dtype is torch.bfloat16
    for _ in range(2):
        ours, theirs = step(fast, autocast=autocast), step(stock, autocast=autocast)
        assert {grad.dtype for grad in ours[1].values()} == {torch.float32}
        assert_equal(ours, theirs, 5e-2 if low else 2e-5)
        tokens = [one.generate(input_ids=IDS[:, :4], max_new_tokens=3, do_sample=False) for one in (fast, stock)]
        assert tokens[0].shape == tokens[1].shape
    assert not fallbacks(report)


def test_compute_precision_is_named_in_the_report() -> None:
    fast = model(dtype=torch.bfloat16)
    report = patch(fast, lora_precision="compute")
    assert "cast to the input's dtype" in str(report)
    _, grads = step(fast)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert not fallbacks(report)


@pytest.mark.parametrize("probability", [0.5, 0.99])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_dropout_draws_pefts_masks(probability: float, dtype: torch.dtype, autocast: bool) -> None:
    # https://github.com/foundation-model-stack/fms-acceleration/issues/97
    fast, stock, report = pair(dtype=dtype, lora_dropout=probability)
    tolerance = 2e-5 if dtype is torch.float32 else 8e-2
    first = step(fast, seed=3, autocast=autocast)
    assert_equal(first, step(stock, seed=3, autocast=autocast), tolerance)
    other = step(stock, seed=4, autocast=autocast)
    name = next(iter(other[1]))
    assert not torch.allclose(first[1][name], other[1][name], rtol=0.1, atol=0)
    assert not fallbacks(report)
    fast.eval()
    stock.eval()
    assert_equal(step(fast, autocast=autocast), step(stock, autocast=autocast), tolerance)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradient_checkpointing(reentrant: bool, patch_first: bool, dropout: float) -> None:
    fast = model("qwen2", lora_dropout=dropout)
    stock = copy.deepcopy(fast)
    expected = step(stock)
    report = patch(fast) if patch_first else None
    fast.enable_input_require_grads()
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    report = report or patch(fast)
    ours = step(fast)
    assert_equal(ours, expected)
    assert {site.calls.served for site in report.fused} <= {1, 2}
    assert max(site.calls.served for site in report.fused) == 2
    assert not fallbacks(report)
    stock.enable_input_require_grads()
    stock.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(step(fast), step(stock))


def test_a_part_of_the_model_called_by_itself_can_be_checkpointed() -> None:
    fast, stock, _ = pair()
    results = []
    for one in (fast, stock):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": False})
        hidden = one.base_model.model.model(input_ids=IDS).last_hidden_state
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    assert_equal((torch.zeros(()), results[0]), (torch.zeros(()), results[1]), 1e-4)


def test_five_steps_of_fused_adamw_equal_stock() -> None:
    fast, stock, report = pair("qwen2")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (fast, stock)]
    for seed in range(5):
        outcomes = [step(fast, seed), step(stock, seed)]
        assert_equal(*outcomes, 2e-3)
        torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert {site.calls.served for site in report.fused} == {5}


@pytest.mark.parametrize("fault", ["scale", "gradient", "other outputs", "other gradients", "factors"])
def test_a_kernel_that_computes_something_else_is_refused(fault: str) -> None:
    def wrong(x: torch.Tensor, operands: Any, dtypes: Dtypes, **options: Any) -> tuple[torch.Tensor, ...]:
        if fault == "scale":
            return lora_linear(x, [o._replace(scaling=o.scaling * 1.01) for o in operands], dtypes, **options)
        if fault == "other outputs":
            first, *others = lora_linear(x, operands, dtypes, **options)
            return (first, *(output * 1.01 for output in others))
        if fault == "other gradients":
            first, *others = operands
            return lora_linear(x, [first, *(o._replace(b=o.b.detach()) for o in others)], dtypes, **options)
        if fault == "factors":
            factors = options.pop("factors")
            factors = factors and factors._replace(a=factors.a * 1.5)
            return lora_linear(x, operands, dtypes, factors=factors, **options)
        return lora_linear(x, [o._replace(a=o.a.detach()) for o in operands], dtypes, **options)

    class Plugin:
        @hookimpl
        def slothplug_kernel(self, operation: str) -> Kernel | None:
            return Kernel(f"wrong {fault}", "torch", wrong) if operation == lora.NAME else None

    plugin = Plugin()
    plugin_manager().register(plugin)
    try:
        with pytest.warns(slothplug.errors.NothingFusedWarning):
            report = patch(model())
    finally:
        plugin_manager().unregister(plugin)
    assert not report.fused
    expected = {"scale": "base torch.float32", "gradient": "base torch.float32", "factors": "autocast on"}
    assert all(expected.get(fault, "siblings, base torch.float32") in site.reason for site in report.left)


def test_undo_restores_pefts_classes() -> None:
    fast, stock, report = pair()
    patched = type(layer(fast, "q_proj"))
    report.undo()
    assert {type(module) for module in fast.modules()} == {type(module) for module in stock.modules()}
    assert type(layer(fast, "q_proj")) is not patched
    assert_equal(step(fast), step(stock), 0.0)
