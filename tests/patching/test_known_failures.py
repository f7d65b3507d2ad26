"""Failures that other projects had, run through ``slothplug.patch``: each test names the report it comes from."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import slothplug
from slothplug.patching.private_class import is_patched, stock_class
from tests.architectures.step import Step
from tests.patching.architectures import IDS, LABELS, assert_same_step, step, tiny
from tests.patching.device import DEVICE

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    defaults = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**defaults | options))


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, slothplug.Report]:
    model, stock = make(), make()
    return model, stock, slothplug.patch(model)


# Dtypes and precision


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("weight", [0.0, 0.00390625, 0.0078125])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, GemmaRMSNorm])
def test_norm_variants(norm: type[nn.Module], dtype: torch.dtype, weight: float, eps: float) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/74: Gemma's 1 + w added in bfloat16 rounds the weight away."""
    model, stock, report = pair(lambda: nn.Sequential(norm(64, eps=eps)).to(dtype))
    assert len(report.fused) == 1
    torch.manual_seed(0)
    x = (torch.randn(6, 64) * torch.tensor([1e-3, 1, 1e3] * 2).unsqueeze(1)).to(dtype)
    found = []
    for one in (model, stock):
        nn.init.constant_(one[0].weight, weight)
        leaf = x.clone().requires_grad_()
        output = one(leaf)
        output.backward(torch.linspace(-1, 1, x.numel()).view_as(x).to(dtype))
        found.append((output.detach(), leaf.grad, one[0].weight.grad))
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found[0][0], found[1][0], rtol=4 * ulp if dtype is torch.float32 else ulp, atol=1e-30)
    if dtype is not torch.float32:  # float32 sums in another order seldom reach the other side of a rounding
        assert (found[0][0] != found[1][0]).float().mean() <= 0.02
    for got, expected in zip(found[0][1:], found[1][1:], strict=True):
        scale = expected.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert ((got - expected).float().abs() / scale).max() <= 4 * ulp


def test_float16_products_that_overflow() -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/600: gate times up beyond 65504, and norms of rows near it."""
    model, stock, report = pair(lambda: tiny("llama", hidden_size=64).half())
    assert not report.left
    for one in (model, stock):
        mlp = one.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_proj.weight.fill_(1.0)
            mlp.up_proj.weight.fill_(1.0)
            mlp.down_proj.weight.fill_(1e-4)
    for value, fits in ((200.0, True), (300.0, False)):
        x = torch.full((1, 2, 64), value / 64, dtype=torch.float16)
        outputs = []
        for one in (model, stock):
            leaf = x.clone().requires_grad_()
            output = one.model.layers[0].mlp(leaf)
            output.sum().backward()
            outputs.append((output.detach(), leaf.grad))
        for got, expected in zip(*outputs, strict=True):
            assert torch.equal(got.isfinite(), expected.isfinite()), value
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-4, equal_nan=True)
        assert outputs[0][0].isfinite().all() == fits
    large = torch.full((1, 2, 64), 6e4, dtype=torch.float16)
    assert model.model.norm(large).isfinite().all()
    torch.testing.assert_close(model.model.norm(large), stock.model.norm(large))
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in (model, stock)]
    for one, optimizer in zip((model, stock), optimizers, strict=True):
        nn.init.constant_(one.model.layers[0].mlp.gate_proj.weight, 0.02)
        step(one)
        optimizer.step()
    losses = [one(input_ids=IDS, labels=LABELS).loss for one in (model, stock)]
    assert losses[0].isfinite() == losses[1].isfinite()
    torch.testing.assert_close(*losses, rtol=5e-3, atol=5e-3, equal_nan=True)


# Loss


@pytest.mark.parametrize("option", ["label_smoothing", "weight"])
def test_options_of_the_loss_are_not_dropped(option: str) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/243: label smoothing never reached the kernel."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        options: Any = {option: 0.1 if option == "label_smoothing" else torch.linspace(0.1, 2, vocab_size)}
        return F.cross_entropy(logits.float().view(-1, vocab_size), shifted.reshape(-1), **options)

    model, stock, report = pair(lambda: tiny("llama"))
    model.loss_function = stock.loss_function = loss
    assert_same_step(step(model), step(stock))
    head = report.by_op()["head"][0]
    assert (head.calls.served, dict(head.calls.fallbacks)) == (1, {})


# Packing


def packed(seed: int) -> dict[str, torch.Tensor]:
    """Two samples in one row, A and B, of 8 and 12 tokens; ``seed`` changes A only."""
    b = torch.arange(20, 32)
    a = torch.randint(3, 60, (8,), generator=torch.Generator(DEVICE).manual_seed(seed))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    labels = torch.cat([torch.full((9,), -100), b[1:]])[None]
    return {"input_ids": torch.cat([a, b])[None], "position_ids": positions, "labels": labels}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(implementation: str) -> None:
    """https://github.com/unslothai/unsloth/issues/1207: a custom forward ignored the borders of packed samples."""
    model, stock, report = pair(lambda: tiny("llama", attn_implementation=implementation))
    losses = {}
    for name, one in (("fast", model), ("stock", stock)):
        losses[name] = [one(**packed(seed), use_cache=False).loss.item() for seed in (1, 2)]
    isolates = losses["stock"][0] == losses["stock"][1]
    assert isolates, "the installed transformers is expected to keep packed samples apart"
    assert losses["fast"][0] == losses["fast"][1]
    assert losses["fast"] == pytest.approx(losses["stock"], abs=1e-6)
    assert not any(site.calls.fallbacks for site in report.fused)


def test_what_describes_a_packed_row_reaches_attention_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/unslothai/unsloth/issues/1207: cu_seqlens and the like belong to the attention."""
    seen: list[dict[str, Any]] = []

    def attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "recording", attention)
    model, stock, _ = pair(lambda: tiny("llama", attn_implementation="recording"))
    lengths = torch.tensor([0, 8, 20], dtype=torch.int32)
    extra = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 12, "max_length_k": 12}
    for one in (model, stock):
        one(**packed(1), use_cache=False, **extra)
    ours, theirs = seen[:2], seen[2:]
    assert len(ours) == len(theirs) == 2
    for got, expected in zip(ours, theirs, strict=True):
        assert got.keys() == expected.keys()
        assert got["cu_seq_lens_q"] is lengths
        assert got["max_length_q"] == 12


# PEFT


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, {"modules_to_save": ["embed_tokens"]}],
    ids=["adapters", "saved copy"],
)
def test_embeddings_and_head_train_as_asked(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """https://github.com/unslothai/unsloth/issues/9326: requested adapters of embeddings and head stayed frozen."""
    model, stock = (with_lora(tiny("llama", tie_word_embeddings=tied), **options) for _ in range(2))
    before = trained(model)
    slothplug.patch(model)
    assert trained(model) == before == trained(stock)
    outcomes = step(model), step(stock)
    assert_same_step(*outcomes)
    assert outcomes[0][1].keys() == before
    assert all(gradient.isfinite().all() and gradient.any() for gradient in outcomes[0][1].values())
    for name, one in (("fast", model), ("stock", stock)):
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1).step()
        one.save_pretrained(tmp_path / name)
    base = tiny("llama", tie_word_embeddings=tied)
    loaded = [peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name) for name in ("fast", "stock")]
    merged = [one.merge_and_unload() for one in (model, stock)]
    with torch.no_grad():
        for got, expected in (loaded, merged):
            logits = expected.eval()(input_ids=IDS).logits
            torch.testing.assert_close(got.eval()(input_ids=IDS).logits, logits, rtol=1e-3, atol=1e-4)


def test_dora_on_layers_and_embeddings() -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/954: an unknown kind of adapter was trained as plain LoRA."""
    for when in ("before", "after"):
        model, stock = tiny("llama"), tiny("llama")
        if when == "before":
            slothplug.patch(model)
        targets = ["q_proj", "up_proj", "embed_tokens"]
        model, stock = (with_lora(one, use_dora=True, target_modules=targets) for one in (model, stock))
        report = slothplug.patch(model)
        assert {site.status for site in report.by_op()["lora"]} == {"left"}
        ours, theirs = step(model), step(stock)
        assert any("magnitude" in name for name in theirs[1])
        assert_same_step(ours, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "bias",
    [
        "none",
        "all",
        pytest.param(
            "lora_only",
            marks=pytest.mark.skipif(
                Version(peft.__version__) < Version("0.21"), reason="this PEFT saves no biases for bias='lora_only'"
            ),
        ),
    ],
)
def test_biased_projections_are_saved_and_reloaded(tmp_path: Path, bias: str) -> None:
    """https://github.com/unslothai/unsloth/issues/478: a bias was lost, or added twice, after a reload."""

    def biased() -> nn.Module:
        return tiny("llama", attention_bias=True)

    model, stock = with_lora(biased(), bias=bias), with_lora(biased(), bias=bias)
    assert model.base_model.model.model.layers[0].self_attn.q_proj.bias.any()
    slothplug.patch(model)
    outcomes = step(model), step(stock)
    assert_same_step(*outcomes)
    assert any(name.endswith("bias") for name in outcomes[0][1]) == (bias != "none")
    for one in (model, stock):
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.05).step()
    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path / "adapter")
    expected = stock(input_ids=IDS, labels=LABELS).loss.item()
    assert model(input_ids=IDS, labels=LABELS).loss.item() == pytest.approx(expected, abs=1e-5)
    loaded = peft.PeftModel.from_pretrained(biased(), tmp_path / "adapter", is_trainable=True)
    slothplug.patch(loaded)
    assert loaded(input_ids=IDS, labels=LABELS).loss.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_biased_adapters_reload_where_slothplug_is_absent(tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/issues/478: gibberish after a reload in a clean process."""
    model = with_lora(tiny("llama", attention_bias=True), bias="all")
    slothplug.patch(model)
    step(model)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05).step()
    model.save_pretrained(tmp_path / "adapter")
    tiny("llama", attention_bias=True).save_pretrained(tmp_path / "base")
    expected = model(input_ids=IDS, labels=LABELS).loss.item()
    assert loss_in_a_clean_process(tmp_path) == pytest.approx(expected, abs=1e-5)


def loss_in_a_clean_process(folder: Path) -> float:
    script = f"""
        import sys
        sys.modules["slothplug"] = None
        import peft, torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(folder / "base")!r})
        model = peft.PeftModel.from_pretrained(model, {str(folder / "adapter")!r})
        ids, labels = torch.tensor({IDS.tolist()}), torch.tensor({LABELS.tolist()})
        print(model(input_ids=ids, labels=labels).loss.item())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


# Which gradients


def test_full_fine_tuning_reaches_every_norm() -> None:
    """https://github.com/unslothai/unsloth/pull/4550: norm weights got no gradient; the incoming one was written."""
    model, stock, report = pair(lambda: tiny("qwen3"))
    assert not report.left
    outcomes = step(model), step(stock)
    assert_same_step(*outcomes)
    assert outcomes[0][1].keys() == dict(model.named_parameters()).keys()
    for one in (model, stock):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("norm" not in name)
    assert_same_step(step(model), step(stock))
    for site in report.fused:
        if site.op in ("rms_norm", "glu"):
            module = model.get_submodule(site.name)
            width = module.weight.numel() if site.op == "rms_norm" else module.gate_proj.in_features
            y = module(torch.randn(2, 3, width, requires_grad=True))
            g = torch.randn_like(y)
            before = g.clone()
            y.backward(g)
            assert torch.equal(g, before), site.name


# Patching


def test_what_frameworks_read_stays_in_every_wrapping(tmp_path: Path) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/339, https://github.com/huggingface/transformers/issues/34016"""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for make in (lambda: tiny("llama"), lambda: with_lora(tiny("llama"))):
            expected = step(make())
            model = make()
            wrapped = nn.parallel.DistributedDataParallel(model)
            signatures = [inspect.signature(one.forward) for one in (wrapped, model)]
            report = slothplug.patch(wrapped)
            assert {site.op for site in report.fused} >= {"rms_norm", "glu", "rotary", "head"}
            assert not report.left
            assert [inspect.signature(one.forward) for one in (wrapped, model)] == signatures
            loss, gradients = step(wrapped)
            got = {name.removeprefix("module."): gradient for name, gradient in gradients.items()}
            assert_same_step(Step(loss, got), expected)
            assert all(site.calls.served for site in report.fused)
    finally:
        torch.distributed.destroy_process_group()


def test_same_parameters_before_and_after_adapters() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/279: patching built new modules without the old weights."""
    for order in ("patch, adapters, patch", "adapters, patch"):
        base = tiny("llama")
        if order.startswith("patch"):
            slothplug.patch(base)
        model, stock = with_lora(base), with_lora(tiny("llama"))
        identities, text = [id(parameter) for parameter in model.parameters()], repr(stock)
        optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad]) for one in (model, stock)]
        slothplug.patch(model)
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert repr(model) == text
        for _ in range(2):
            assert_same_step(step(model), step(stock))
            for optimizer in optimizers:
                optimizer.step()


def test_teacher_and_student_of_one_class() -> None:
    """https://github.com/unslothai/unsloth/issues/1713: classes replaced process-wide reached the other model."""
    student, teacher = tiny("llama", seed=1), tiny("llama", seed=2).eval()
    cross_entropy, forward = F.cross_entropy, type(teacher).forward
    slothplug.patch(student)
    assert not any(is_patched(module) for module in teacher.modules())
    assert F.cross_entropy is cross_entropy
    assert type(teacher).forward is forward
    assert stock_class(student) is type(teacher)
    with torch.no_grad():
        target = teacher(input_ids=IDS).logits.softmax(-1)
    results = []
    for one in (student, tiny("llama", seed=1)):
        output = one(input_ids=IDS, labels=LABELS)
        (output.loss + F.kl_div(output.logits.log_softmax(-1), target, reduction="batchmean")).backward()
        results.append(Step(output.loss.detach(), {name: p.grad for name, p in one.named_parameters()}))
    assert_same_step(*results)


def test_blocks_that_are_eligible_in_part() -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2770: half a block patched and the rest without its parts."""

    class Noisy(nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), 0.5, self.training)

    def make() -> nn.Module:
        model = with_lora(tiny("llama"), target_modules=["q_proj", "v_proj"])
        layers = model.base_model.model.model.layers
        layers[0].mlp.act_fn = Noisy()
        layers[1].self_attn.q_proj.lora_dropout["default"] = nn.Dropout(0.3)
        k_proj = layers[1].self_attn.k_proj
        k_proj.bias = nn.Parameter(torch.randn(k_proj.out_features))
        return model

    model, stock, report = pair(make)
    status = {(site.op, site.name): site.status for site in report.sites}
    assert status["glu", "model.layers.1.mlp"] == "fused"
    assert status["glu", "model.layers.0.mlp"] == "left"
    assert {name for (op, name), what in status.items() if op == "lora" and what == "fused"} == {
        f"model.layers.{index}.self_attn.{name}" for index in (0, 1) for name in ("q_proj", "v_proj")
    }
    assert_same_step(step(model), step(stock))


def test_a_copy_of_an_adapted_model_trains_its_own_weights() -> None:
    """https://github.com/unslothai/unsloth/pull/8344: a deep copy kept calling the weights of the original."""
    model, stock, _ = pair(lambda: with_lora(tiny("llama")))
    double, reference = copy.deepcopy(model), copy.deepcopy(stock)
    for one in (double, reference):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.9)
    assert_same_step(step(double), step(reference))
    assert_same_step(step(model), step(stock))


def test_a_class_of_remote_code() -> None:
    """https://github.com/huggingface/transformers/issues/34016: a flag that finds nothing in unlisted code."""
    model, stock = tiny("llama"), tiny("llama")
    for module in model.modules():
        if type(module).__module__.startswith("transformers.models"):
            own = {"__module__": "remote_code", "__qualname__": "Unheard"}
            module.__class__ = type("Unheard", (type(module),), own)
    report = slothplug.patch(model)
    assert {site.op for site in report.fused} == {"rms_norm", "glu", "rotary", "head"}
    assert not report.left
    assert_same_step(step(model), step(stock))
