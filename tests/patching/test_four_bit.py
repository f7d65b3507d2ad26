"""QLoRA: PEFT's layers on bitsandbytes' 4-bit layers are served with stock's numbers, or left with a reason."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.ops.lora import DEQUANTIZE
from slothplug.ops.peft_lora.four_bit import why_not_dtypes
from slothplug.patching.served import STATE
from slothplug.patching.sites import Kernel
from slothplug.plugins import plugin_manager
from tests.architectures.step import Step
from tests.patching.architectures import IDS, assert_same_step, step, tiny
from tests.patching.device import DEVICE, cpu_only

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def four_bit(linear: nn.Linear, compute_dtype: torch.dtype, **options: Any) -> nn.Module:
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=compute_dtype, **options
    )
    layer.load_state_dict(linear.state_dict())
    layer.compute_type_is_set = True
    return layer.to(linear.weight.dtype).to(DEVICE)


def qlora(
    compute_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    dropout: float = 0.0,
    use_dora: bool = False,
    **options: Any,
) -> nn.Module:
    """A tiny model with 4-bit decoder layers and an adapter whose B is not zero."""
    model = tiny("llama", attention_bias=bias, mlp_bias=bias).to(dtype)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in TARGETS:
            model.set_submodule(name, four_bit(module, compute_dtype, **options))
    model.is_loaded_in_4bit = True
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=TARGETS, init_lora_weights=False, lora_dropout=dropout, use_dora=use_dora
    )
    return peft.get_peft_model(model, config).train()


def lora_of(report: slothplug.Report) -> list[Any]:
    return report.by_op()["lora"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options", [{"quant_type": "nf4"}, {"quant_type": "fp4", "compress_statistics": False}], ids=str
)
def test_a_step_is_stocks(bias: bool, options: dict[str, Any]) -> None:
    model, stock = (qlora(bias=bias, **options) for _ in range(2))
    report = slothplug.patch(model)
    assert [site.status for site in lora_of(report)] == ["fused"] * 14
    for _ in range(2):
        assert_same_step(step(model), step(stock))
    calls = [site.calls for site in lora_of(report)]
    assert sum(one.served for one in calls) == 28
    assert sum(one.collected for one in calls) == 2 * 2 * 3  # of q, k, v and gate, up each but the first
    assert not any(one.fallbacks for one in calls)


def distance(got: Step, exact: Step) -> float:
    errors = [(got.gradients[name].double() - gradient).norm() for name, gradient in exact.gradients.items()]
    sizes = [gradient.norm() for gradient in exact.gradients.values()]
    return float(sum(errors) / sum(sizes))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(dtype: torch.dtype, dropout: float) -> None:
    """As a Trainer with ``bf16=True`` has it: no further from a step in float32 than stock is, and the same masks."""
    steps = []
    for patched in (True, False):
        model = qlora(torch.bfloat16, dtype, dropout=dropout)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        if patched:
            report = slothplug.patch(model, {"ops": ["lora"]})
            assert [site.status for site in lora_of(report)] == ["fused"] * 14
        with torch.autocast(DEVICE, torch.bfloat16):
            steps.append(step(model))
    if dropout:
        assert distance(*steps) < 0.05  # with other masks 0.5
        return
    exact = step(qlora())
    assert distance(steps[0], exact) <= 1.1 * distance(steps[1], exact)


def test_autocasts_default_may_be_finer_than_the_base_layer() -> None:
    """float16 on a GPU, whatever dtype the trainer will choose."""
    default = torch.get_autocast_dtype(DEVICE)
    torch.set_autocast_dtype(DEVICE, torch.float16)
    try:
        for seed in range(4):
            torch.manual_seed(seed)
            report = slothplug.patch(qlora(torch.bfloat16, torch.bfloat16), {"ops": ["lora"]})
            assert [site.reason for site in lora_of(report)] == [""] * 14
    finally:
        torch.set_autocast_dtype(DEVICE, default)


def test_nothing_unpacked_is_kept_for_the_backward() -> None:
    model = qlora()
    slothplug.patch(model, {"skip_ops": ["head"]})
    model.base_model.model.lm_head = nn.Identity()  # whose weight has such a shape
    unpacked = {tuple(module.base_layer.weight.quant_state.shape) for module in model.modules() if is_lora(module)}
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=IDS)
    assert shapes
    assert not unpacked & set(shapes)


def is_lora(module: nn.Module) -> bool:
    return isinstance(module, peft.tuners.lora.bnb.Linear4bit)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant: bool) -> None:
    model, stock = qlora(), qlora()
    report = slothplug.patch(model)
    for one in (model, stock):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model), step(stock))
    if reentrant and DEVICE == "cuda":  # 40 rows: the first forward, which has no gradients, is bitsandbytes' own
        assert any("few tokens" in reason for site in lora_of(report) for reason in site.calls.fallbacks)


@pytest.mark.parametrize("tokens", [5, 400])
def test_without_gradients(tokens: int) -> None:
    # Only lora: a product in bfloat16 would magnify another operation's roundings in float32.
    model, stock = qlora().eval(), qlora().eval()
    report = slothplug.patch(model, {"ops": ["lora"]})
    ids = torch.randint(60, (1, tokens), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(*(one(input_ids=ids).logits for one in (model, stock)), rtol=1e-4, atol=1e-5)
    reasons = {reason for site in lora_of(report) for reason in site.calls.fallbacks}
    if DEVICE == "cuda":
        assert all("few tokens" in reason for reason in reasons)
        assert bool(reasons) == (tokens == 5)
    else:
        assert reasons == ({REPACKS} if first_base(model).support_avx512bf16_for_cpu else set())


REPACKS = "an evaluation without gradients, for which bitsandbytes repacks the weight on this CPU"
REPACKED = "bitsandbytes has repacked its weight for evaluation on this CPU; model.state_dict() restores the format"


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits


@cpu_only
def test_without_gradients_where_bitsandbytes_does_not_repack() -> None:
    """CPUs without AVX512-BF16."""
    model, stock = qlora(), qlora()
    for one in (model, stock):
        for module in one.modules():
            if is_lora(module):
                module.base_layer.support_avx512bf16_for_cpu = False
    report = slothplug.patch(model)
    torch.testing.assert_close(evaluate(model), evaluate(stock), rtol=1e-4, atol=1e-5)
    assert not any(site.calls.fallbacks for site in lora_of(report))


@cpu_only
def test_training_after_an_evaluation_is_stocks() -> None:
    """On CPUs with AVX512-BF16 the evaluation leaves repacked weights behind; ``state_dict`` packs them back."""
    model, stock = qlora(), qlora()
    report = slothplug.patch(model, {"ops": ["lora"]})
    repacks = first_base(model).support_avx512bf16_for_cpu
    torch.testing.assert_close(evaluate(model), evaluate(stock), rtol=1e-4, atol=1e-5)
    assert_same_step(step(model.train()), step(stock.train()))
    reasons = {reason for site in lora_of(report) for reason in site.calls.fallbacks}
    assert reasons == ({REPACKS, REPACKED} if repacks else set())
    for one in (model, stock):
        one.state_dict()
    for site in lora_of(report):
        site.calls.fallbacks.clear()
    assert_same_step(step(model), step(stock))
    assert not any(site.calls.fallbacks for site in lora_of(report))


@cpu_only
def test_an_evaluation_with_gradients_does_not_repack() -> None:
    model, stock = qlora().eval(), qlora().eval()
    for one in (model, stock):
        one.enable_input_require_grads()
    report = slothplug.patch(model)
    assert_same_step(step(model), step(stock))
    assert not any(site.calls.fallbacks for site in lora_of(report))


@cpu_only
def test_a_weight_that_was_repacked_before_the_patch_is_left() -> None:
    model = qlora()
    if not first_base(model).support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes repacks on CPUs with AVX512-BF16 only")
    evaluate(model)
    with pytest.warns(slothplug.errors.NothingFusedWarning):
        report = slothplug.patch(model, {"ops": ["lora"]})
    assert {site.reason for site in lora_of(report)} == {REPACKED}


def not_quantised(base: Any) -> None:
    base.weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False)


def test_a_weight_that_is_not_quantised_is_left() -> None:
    model = qlora()
    not_quantised(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer)
    report = slothplug.patch(model, {"ops": ["lora"]})
    [left] = [site for site in lora_of(report) if site.status == "left"]
    assert "not quantised yet" in left.reason


def test_a_bias_of_another_dtype_is_settled_by_the_first_call() -> None:
    """``prepare_model_for_kbit_training`` leaves biases in float32."""
    model, stock = (qlora(torch.bfloat16, torch.bfloat16, bias=True) for _ in range(2))
    for one in (model, stock):
        for name, parameter in one.named_parameters():
            if name.endswith("bias"):
                parameter.data = parameter.data.float()
    report = slothplug.patch(model, {"ops": ["lora"]})
    assert [site.status for site in lora_of(report)] == ["fused"] * 14
    exact = step(qlora(bias=True))
    for _ in range(2):
        ours, theirs = step(model), step(stock)
        assert distance(ours, exact) <= 1.1 * distance(theirs, exact)
    settled = "its bias is torch.float32 still, and its base layer computes in torch.bfloat16"
    assert [site.calls.fallbacks[settled] for site in lora_of(report)] == [1] * 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_compute_dtype_under_autocast(dtype: torch.dtype) -> None:
    """float32: under autocast bitsandbytes multiplies in autocast's dtype all the same."""
    model, stock = (qlora(torch.float32, dtype) for _ in range(2))
    report = slothplug.patch(model, {"ops": ["lora"]})
    assert [site.status for site in lora_of(report)] == ["fused"] * 14
    with torch.autocast(DEVICE, torch.bfloat16):
        steps = step(model), step(stock)
    exact = step(qlora())
    assert distance(steps[0], exact) <= 1.1 * distance(steps[1], exact)
    assert not any(site.calls.fallbacks for site in lora_of(report))
    assert_same_step(step(model), step(stock))
    reasons = {reason for site in lora_of(report) for reason in site.calls.fallbacks}
    assert reasons == (
        set() if dtype is torch.float32 else {f"its weight was {dtype}, and its base layer computes in torch.float32"}
    )


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("x", "computes_in", "was", "autocast", "served"),
    [
        (BRAIN, BRAIN, BRAIN, None, True),
        (SINGLE, BRAIN, BRAIN, None, True),
        (BRAIN, SINGLE, SINGLE, None, True),
        (BRAIN, SINGLE, BRAIN, None, False),
        (BRAIN, HALF, HALF, None, False),
        (BRAIN, BRAIN, HALF, None, True),
        (BRAIN, SINGLE, BRAIN, BRAIN, True),
        (SINGLE, BRAIN, BRAIN, BRAIN, True),
        (BRAIN, BRAIN, BRAIN, HALF, False),
        (SINGLE, HALF, HALF, BRAIN, False),
        (HALF, BRAIN, BRAIN, BRAIN, False),
    ],
)
def test_dtypes_that_are_served(
    x: torch.dtype, computes_in: torch.dtype, was: torch.dtype, autocast: torch.dtype | None, served: bool
) -> None:
    assert (why_not_dtypes(x, computes_in, was, autocast) is None) == served


def test_what_changes_after_the_patch_falls_back() -> None:
    model, stock = qlora(), qlora()
    report = slothplug.patch(model)
    for one in (model, stock):
        one.base_model.model.model.layers[0].self_attn.q_proj.base_layer.compute_type_is_set = False
    assert_same_step(step(model), step(stock))
    [calls] = [site.calls for site in lora_of(report) if site.calls.fallbacks]
    assert "compute_dtype" in str(calls.fallbacks)
    assert_same_step(step(model), step(stock))
    # bitsandbytes' own forward has settled it.
    assert calls.fallbacks["its base layer has not chosen compute_dtype yet"] == 1


def first_base(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj.base_layer


def test_a_compute_dtype_that_was_never_given_is_chosen_by_the_first_call() -> None:
    model, stock = qlora(), qlora()
    for one in (model, stock):
        first_base(one).compute_dtype, first_base(one).compute_type_is_set = None, False
    report = slothplug.patch(model, {"ops": ["lora"]})
    assert [site.status for site in lora_of(report)] == ["fused"] * 14
    for _ in range(2):
        assert_same_step(step(model), step(stock))
    assert sum(site.calls.fallbacks["its base layer has not chosen compute_dtype yet"] for site in lora_of(report)) == 1


def test_a_weight_that_lies_in_a_row() -> None:
    """``dequantize_4bit`` would transpose it, which shows in a square layer."""
    model, stock = qlora(), qlora()
    report = slothplug.patch(model)
    for one in (model, stock):
        weight = first_base(one).weight
        weight.data = weight.data.view(1, -1)
    assert_same_step(step(model), step(stock))
    assert any(site.calls.fallbacks for site in lora_of(report))


def test_new_weights_between_two_siblings() -> None:
    model, stock = qlora().eval(), qlora().eval()
    slothplug.patch(model)
    x, found = torch.randn(2, 5, 64, device=DEVICE), []
    for one in (model, stock):
        attention = one.base_model.model.model.layers[0].self_attn
        attention.q_proj(x)
        one.merge_adapter()
        one.unmerge_adapter()  # quantises anew
        found.append(attention.k_proj(x))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_base_layer_in_somebody_elses_hands_is_left() -> None:
    model = qlora()
    base = first_base(model)
    base.forward = type(base).forward.__get__(base)
    report = slothplug.patch(model, {"ops": ["lora"]})
    [left] = [site for site in lora_of(report) if site.status == "left"]
    assert left.reason == "Linear4bit in it: its forward was replaced on the instance by somebody else"


def test_pefts_plain_layer_on_a_four_bit_layer_is_left() -> None:
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj = four_bit(attention.q_proj, torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    report = slothplug.patch(model)
    [left] = [site for site in lora_of(report) if site.status == "left"]
    assert "is_loaded_in_4bit" in left.reason


def test_disabled_merged_and_undone() -> None:
    model, stock = qlora(), qlora()
    report = slothplug.patch(model, {"ops": ["lora"]})
    for one in (model, stock):
        one.eval()

    def same() -> None:
        with torch.no_grad():
            torch.testing.assert_close(*(one(input_ids=IDS).logits for one in (model, stock)), rtol=1e-4, atol=1e-5)

    same()
    with model.disable_adapter(), stock.disable_adapter():
        same()
    for one in (model, stock):
        one.merge_adapter()
    same()
    for one in (model, stock):
        one.unmerge_adapter()
    same()
    report.undo()
    assert not any(STATE in module.__dict__ for module in model.modules())
    same()


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_plugin_can_dequantise(factor: float) -> None:
    calls = []

    def dequantize(stored: torch.Tensor, state: Any) -> torch.Tensor:
        calls.append(stored)
        weight: torch.Tensor = bitsandbytes.functional.dequantize_4bit(stored, state)
        return weight * factor

    class Plugin:
        @hookimpl
        def slothplug_kernel(self, operation: str) -> Kernel | None:
            return Kernel("mine", "torch", dequantize) if operation == DEQUANTIZE else None

    plugin = Plugin()
    plugin_manager().register(plugin)
    try:
        model, stock = qlora(), qlora()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", slothplug.errors.NothingFusedWarning)
            report = slothplug.patch(model, {"ops": ["lora"]})
    finally:
        plugin_manager().unregister(plugin)
    assert {site.status for site in lora_of(report)} == {"fused" if factor == 1.0 else "left"}
    calls.clear()
    assert_same_step(step(model), step(stock))
    assert bool(calls) == (factor == 1.0)


def test_dora_is_left() -> None:
    report = slothplug.patch(qlora(use_dora=True), {"ops": ["lora", "head"]})
    assert {site.reason for site in lora_of(report)} == {"its adapter is no plain LoRA (DoraLinearVariant)"}


def test_eight_bit_layers_are_left() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].self_attn.q_proj
    eight = bitsandbytes.nn.Linear8bitLt(64, layer.out_features, bias=False, has_fp16_weights=False)
    model.model.layers[0].self_attn.q_proj = eight.to(DEVICE)
    model.is_loaded_in_8bit = True
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    report = slothplug.patch(model)
    [left] = [site for site in lora_of(report) if site.status == "left"]
    assert left.reason.startswith("its base layer is a Linear8bitLt")


@cpu_only
def test_loaded_by_transformers_and_saved(tmp_path: Path) -> None:
    """The whole way: quantised on loading, prepared, trained a step, saved; the adapter loads with plain PEFT."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny("llama").save_pretrained(tmp_path / "model")

    def load() -> nn.Module:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=quantised)
        return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    def adapt() -> nn.Module:
        base = load()
        torch.manual_seed(2)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)).train()

    model, stock = adapt(), adapt()
    report = slothplug.patch(model)
    assert [site.status for site in lora_of(report)] == ["fused"] * 14
    assert_same_step(step(model), step(stock))
    for one in (model, stock):
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1).step()
    torch.testing.assert_close(step(model).loss, step(stock).loss, rtol=1e-5, atol=0.0)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    with torch.no_grad():  # in training mode, in which bitsandbytes repacks no weight
        logits = [one.train()(input_ids=IDS).logits for one in (loaded, model, stock)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-5)
    assert model.get_memory_footprint() == stock.get_memory_footprint()
