"""Fused LoRA layers in real PEFT models: the same losses, gradients and states as PEFT's own forward."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.kernels.lora import lora_linear
from slothplug.patching import siblings
from slothplug.patching.ops import lora
from slothplug.patching.report import Report
from slothplug.patching.sites import STATE, Kernel
from slothplug.plugins import plugin_manager
from tests.patching.device import DEVICE

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = 2
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.randint(3, 60, (3, 10), generator=torch.Generator(DEVICE).manual_seed(5))

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]


def model(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A tiny model with adapters whose B is not zero and biases that are not."""
    torch.manual_seed(0)
    base = (
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
        if kind == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    ).to(dtype)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    defaults: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(PROJECTIONS),
        "init_lora_weights": False,
    }
    adapted = get_peft_model(base, LoraConfig(**{**defaults, **config}))
    adapted.config.use_cache = False
    return adapted.train()


def patch(patched: nn.Module, **settings: Any) -> Report:
    return slothplug.patch(patched, {"ops": ["lora"], **settings})


def pair(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """A patched model, its unpatched copy, and the report."""
    fast = model(kind, dtype, **config)
    stock = copy.deepcopy(fast)
    return fast, stock, patch(fast)


def step(one: nn.Module, seed: int = 3, autocast: bool = False) -> Outcome:
    one.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = one(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


def logits(one: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return one(input_ids=IDS).logits


def assert_equal(ours: Outcome, stock: Outcome, tolerance: float = 2e-5) -> None:
    """Losses and gradients, the latter relative to each one's norm."""
    assert ours[1].keys() == stock[1].keys()
    torch.testing.assert_close(ours[0], stock[0], rtol=tolerance, atol=tolerance)
    for name, expected in stock[1].items():
        got = ours[1][name]
        assert got.dtype is expected.dtype, name
        error = (got - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: {error:.1e}"


def fallbacks(report: Report) -> dict[str, int]:
    total: dict[str, int] = {}
    for site in report.fused:
        for reason, count in site.calls.fallbacks.items():
            total[reason] = total.get(reason, 0) + count
    return total


def layer(one: nn.Module, name: str) -> nn.Module:
    return next(module for path, module in one.named_modules() if path.endswith(name))


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
    for site in report.fused:
        site.calls.count_backward = True
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


def test_siblings_share_one_node() -> None:
    fast, _, _ = pair()
    nodes: dict[str, object] = {}
    inside = [f"layers.0.self_attn.{name}" for name in PROJECTIONS[:4]] + [
        f"layers.0.mlp.{name}" for name in PROJECTIONS[4:]
    ]
    originals = {name: layer(fast, name).__dict__[STATE].calls for name in inside}
    for name, calls in originals.items():
        serve = type(calls).serve
        calls.serve = lambda y, name=name, calls=calls, serve=serve: (nodes.update({name: y.grad_fn}), serve(calls, y))[
            1
        ]
    step(fast)
    q, k, v, o, gate, up, down = (nodes[name] for name in inside)
    assert q is k is v
    assert gate is up
    assert len({id(node) for node in (q, o, gate, down)}) == 4


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


def test_a_deep_copy_uses_its_own_weights_and_siblings() -> None:
    fast, stock, _ = pair()
    duplicate = copy.deepcopy(fast)
    stock_duplicate = copy.deepcopy(stock)
    for one in (duplicate, stock_duplicate):
        with torch.no_grad():
            for parameter in one.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
    assert_equal(step(duplicate), step(stock_duplicate))
    assert_equal(step(fast), step(stock))
    for one in (fast, duplicate):
        names = ("q_proj", "k_proj", "v_proj")
        own = [layer(one, f"layers.0.self_attn.{name}") for name in names]
        group = own[0].__dict__[STATE].params.group
        assert all(module.__dict__[STATE].params.group is group for module in own)
        assert [reference() for reference in group.modules] == own


def test_a_single_layer_can_be_copied_and_freed() -> None:
    fast, _, _ = pair()
    single = copy.deepcopy(layer(fast, "layers.0.self_attn.q_proj"))
    x = torch.randn(2, 32)
    torch.testing.assert_close(single(x), layer(fast, "layers.0.self_attn.q_proj")(x))
    freed = weakref.ref(single)
    del single
    gc.collect()
    assert freed() is None


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


def siblings_of(one: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    q, k, v = (layer(one, f"layers.0.self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj"))
    return q, k, v


def test_a_sibling_with_another_input_computes_by_itself() -> None:
    fast, stock, report = pair()
    ours, theirs = siblings_of(fast), siblings_of(stock)
    x, other = torch.randn(2, 32, requires_grad=True), torch.randn(2, 32)
    for (q, k, v), (q2, k2, v2) in [(ours, theirs)]:
        torch.testing.assert_close(q(x), q2(x))
        torch.testing.assert_close(k(other), k2(other))
        torch.testing.assert_close(v(x), v2(x))
    assert fallbacks(report) == {siblings.ANOTHER_INPUT: 1}


def test_what_changed_between_two_siblings_is_seen() -> None:
    fast, stock, _ = pair()
    (q, k, v), (_, k2, v2) = siblings_of(fast), siblings_of(stock)
    x = torch.randn(2, 32)
    q(x)
    x.mul_(2)
    torch.testing.assert_close(k(x), k2(x))
    q(x)
    with torch.no_grad():
        for one in (v, v2):
            one.lora_B["default"].weight.mul_(3)
    torch.testing.assert_close(v(x), v2(x))
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad
    q(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert k(x).dtype is torch.bfloat16
    q(x)
    k.scale_layer(2.0)
    k2.scale_layer(2.0)
    torch.testing.assert_close(k(x), k2(x))


def test_nothing_is_kept_past_the_call() -> None:
    fast, _, report = pair()
    k = siblings_of(fast)[1]
    k.forward = lambda x: nn.functional.linear(x, k.base_layer.weight)  # somebody's k_proj never collects
    assert_equal(step(fast), step(fast))
    assert siblings._local.round is None
    assert "hooks" not in str(fallbacks(report))

    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    fast, _, report = pair()
    layer(fast, "layers.0.self_attn").k_proj = Gives()
    with pytest.raises(KeyboardInterrupt):
        fast(input_ids=IDS)
    assert siblings._local.round is None
    assert fallbacks(report) == {siblings.NOT_ASKED_FOR: 1}  # v_proj's; k_proj is gone


def test_replicas_of_data_parallel_compute_by_themselves() -> None:
    fast, stock, _ = pair()
    x = torch.randn(2, 32)
    (q, _, _), (q2, _, _) = siblings_of(fast), siblings_of(stock)
    replica = q._replicate_for_data_parallel()
    torch.testing.assert_close(replica(x), q2(x))
    assert siblings._local.round is None


def test_which_layers_are_siblings() -> None:
    class Parent(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(4, 4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Parent("q_proj", "k_proj", "v_proj", "o_proj")
            self.encoder_attn = Parent("q_proj", "k_proj", "v_proj")
            self.bert = Parent("query", "key", "value", "dense")
            self.mlp = Parent("gate_proj", "up_proj", "down_proj")
            self.t5 = Parent("wi_0", "wi_1", "wo")
            self.expert = Parent("w1", "w2", "w3")
            self.lonely = Parent("q_proj", "o_proj")

    parent = Model()
    linears = {name: module for name, module in parent.named_modules() if isinstance(module, nn.Linear)}
    members = siblings.groups_in(linears, parent)
    names = {module: name for name, module in linears.items()}
    grouped = sorted(tuple(names[m] for m in group) for _, group in by_group(members))
    assert grouped == [
        ("bert.query", "bert.key", "bert.value"),
        ("expert.w1", "expert.w3"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("t5.wi_0", "t5.wi_1"),
    ]


def by_group(members: dict[nn.Module, siblings.Member]) -> Iterator[tuple[siblings.Group, list[nn.Module]]]:
    key: Callable[[nn.Module], int] = lambda module: id(members[module].group)  # noqa: E731
    for _, modules in itertools.groupby(sorted(members, key=key), key=key):
        own = sorted(modules, key=lambda module: members[module].index)
        yield members[own[0]].group, own


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


def test_outputs_kept_in_a_backward_pass_are_dropped_at_its_end() -> None:
    fast, _, report = pair()
    q, k, _ = siblings_of(fast)
    x = torch.randn(2, 32, requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        y = torch.utils.checkpoint.checkpoint(lambda x: q(x) + k(x)[:, :1], x, use_reentrant=False)
    siblings.clear()  # a part of the model called by itself has no end
    y.sum().backward()  # on a GPU it recomputes on another thread
    current = siblings._local.round
    assert current is None or not current.kept
    assert fallbacks(report)[siblings.NOT_ASKED_FOR] == 2  # v_proj's, of the forward and of the recompute


def test_an_output_is_not_collected_in_another_mode() -> None:
    fast, stock, _ = pair()
    (q, k, _), (_, k2, _) = siblings_of(fast), siblings_of(stock)
    x = torch.randn(2, 32)
    with torch.no_grad():
        q(x)
        with torch.inference_mode():
            assert k(x).is_inference()
            torch.testing.assert_close(k(x), k2(x))


def test_inputs_of_other_types_are_answered_by_peft() -> None:
    class Odd(torch.Tensor):
        pass

    fast, stock, report = pair()
    x = torch.randn(2, 32)
    outputs = [layer(one, "q_proj")(x.as_subclass(Odd)) for one in (fast, stock)]
    assert type(outputs[0]) is Odd
    assert torch.equal(*outputs)
    assert fallbacks(report) == {"input of type Odd": 1}


def test_transposed_weights_are_left() -> None:
    base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=61, n_positions=16))
    fast = get_peft_model(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.warns(slothplug.errors.NothingFusedWarning):
        report = patch(fast)
    assert [site.reason for site in report.left] == [
        "its base layer is a Conv1D; only nn.Linear and bitsandbytes' 4-bit layers are fused"
    ]


@pytest.mark.parametrize("fault", ["scale", "gradient", "other outputs", "other gradients", "lowered"])
def test_a_kernel_that_computes_something_else_is_refused(fault: str) -> None:
    def wrong(x: torch.Tensor, operands: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        if fault == "scale":
            return lora_linear(x, [o._replace(scaling=o.scaling * 1.01) for o in operands], **options)
        if fault == "other outputs":
            first, *others = lora_linear(x, operands, **options)
            return (first, *(output * 1.01 for output in others))
        if fault == "other gradients":
            first, *others = operands
            return lora_linear(x, [first, *(o._replace(b=o.b.detach()) for o in others)], **options)
        if fault == "lowered":
            lowered = options.pop("lowered")
            lowered = lowered and [(a * 1.5, b) for a, b in lowered]
            return lora_linear(x, operands, lowered=lowered, **options)
        return lora_linear(x, [o._replace(a=o.a.detach()) for o in operands], **options)

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
    expected = {"scale": "base torch.float32", "gradient": "base torch.float32", "lowered": "autocast on"}
    assert all(expected.get(fault, "siblings, base torch.float32") in site.reason for site in report.left)


def test_undo_restores_pefts_classes() -> None:
    fast, stock, report = pair()
    patched = type(layer(fast, "q_proj"))
    report.undo()
    assert {type(module) for module in fast.modules()} == {type(module) for module in stock.modules()}
    assert type(layer(fast, "q_proj")) is not patched
    assert_equal(step(fast), step(stock), 0.0)
