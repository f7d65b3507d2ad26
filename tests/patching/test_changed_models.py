"""A model that is changed, moved, saved or merged around the patch computes what stock does, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import slothplug
from slothplug.patching.private_class import is_patched
from tests.patching.device import DEVICE
from tests.patching.full_and_lora import IDS, assert_same, core, full, lora, pair, reasons, step

# Changes after the patch


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float64, 1e-6)], ids=str
)
def test_a_dtype_changed_after_the_patch(make: Callable[[], nn.Module], dtype: torch.dtype, tolerance: float) -> None:
    model, stock, report = pair(make)
    assert_same(step(model.to(dtype)), step(stock.to(dtype)), tolerance)
    assert bool(reasons(report)) == (dtype is torch.float64)
    assert_same(step(model.float()), step(stock.float()), tolerance)


def test_a_float64_model_is_left_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model, stock = make().double(), make().double()
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(model)
    assert {s.reason for s in report.left if s.op in ("rms_norm", "glu", "rotary", "lora")} == {
        f"no kernel for {DEVICE} and torch.float64"
    }
    assert_same(step(model), step(stock), 1e-6)


def test_weights_tied_and_embeddings_resized_after_the_patch() -> None:
    model, stock, report = pair(full)
    for one in (model, stock):
        core(one).lm_head.weight = core(one).model.embed_tokens.weight
    assert_same(step(model), step(stock))
    for one in (model, stock):
        torch.manual_seed(5)
        one.resize_token_embeddings(80)
    assert_same(step(model), step(stock))
    assert not reasons(report)
    again = slothplug.patch(model)
    assert not again.left
    assert_same(step(model), step(stock))
    again.undo()
    assert not any(is_patched(module) for module in model.modules())


def test_requires_grad_toggled_after_the_patch(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    for trained in ("q_proj", "norm", "embed", "lm_head", "mlp"):
        for one in (model, stock):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(trained in name)
        assert_same(step(model), step(stock))
    for one in (model, stock):
        one.requires_grad_(False)
    got, expected = (one(input_ids=IDS, labels=IDS).loss for one in (model, stock))
    assert not got.requires_grad
    torch.testing.assert_close(got, expected)
    assert not reasons(report)


@pytest.mark.parametrize("values", [torch.complex64, torch.int32], ids=str)
def test_weights_that_no_kernel_takes(values: torch.dtype) -> None:
    """A norm whose weight becomes something else computes what stock does, and the report says why."""
    model, stock, report = pair(full)
    for one in (model, stock):
        weight = core(one).model.norm.weight
        core(one).model.norm.weight = nn.Parameter(weight.detach().round().to(values), requires_grad=False)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model.model.norm(x), stock.model.norm(x))
    assert reasons(report) == {f"input of torch.float32, weight of {values}"}
    slothplug.unpatch(model)
    slothplug.patch(model)
    torch.testing.assert_close(model.model.norm(x), stock.model.norm(x))


def _replace_data(model: nn.Module) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 0.5


@pytest.mark.parametrize("change", [_replace_data, lambda model: model.to(torch.bfloat16)], ids=[".data", "to"])
def test_logits_of_weights_that_were_replaced_are_refused(change: Callable[[nn.Module], object]) -> None:
    model = full()
    slothplug.patch(model)
    with torch.no_grad():
        output = model(input_ids=IDS, labels=IDS)
    change(model)
    with pytest.raises(slothplug.StaleLogitsError, match=r"written or replaced.*keep_logits: true"):
        output.logits.sum()


def test_a_verdict_is_not_kept_for_a_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    slothplug.patch(lora())
    forward = peft.tuners.lora.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, *a, **k: forward(self, *a, **k) * 1.5)
    stock, model = lora(), lora()
    report = slothplug.patch(model)
    assert not [site for site in report.fused if site.op == "lora"]
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, stock(input_ids=IDS, labels=IDS).loss)
    monkeypatch.undo()
    assert [site for site in slothplug.patch(lora()).fused if site.op == "lora"]


# Devices and offloading


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_partly_on_meta_is_served_where_its_weights_are(make: Callable[[], nn.Module], layer: int) -> None:
    model = make()
    core(model).model.layers[layer].to("meta")
    report = slothplug.patch(model)
    assert {site.reason.removeprefix("Linear in it: ") for site in report.left} == {
        "its weights are on the meta device"
    }
    assert {f".{layer}." in site.name for site in report.left} == {True}
    assert {f".{1 - layer}." in site.name or "norm" in site.name or "head" in site.name for site in report.fused} == {
        True
    }


def test_embeddings_on_meta_do_not_keep_the_rest_from_being_served(make: Callable[[], nn.Module]) -> None:
    model = make()
    core(model).model.embed_tokens.to("meta")
    assert not slothplug.patch(model).left


def test_offloading_by_accelerate_before_and_after_the_patch(make: Callable[[], nn.Module]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, stock, _ = pair(make)
    before = make()
    accelerate.cpu_offload(before, execution_device=torch.device("cpu"))
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(before)
    assert not report.fused
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad():
        expected = stock(input_ids=IDS, labels=IDS)
        for one in (before, model):
            got = one(input_ids=IDS, labels=IDS)
            torch.testing.assert_close(got.loss, expected.loss)
            torch.testing.assert_close(one(input_ids=IDS).logits, expected.logits)


# Saving


def test_saved_files_are_stocks_and_load_patched(make: Callable[[], nn.Module], tmp_path: Any) -> None:
    model, stock, _ = pair(make)
    for name, one in (("fast", model), ("stock", stock)):
        one.save_pretrained(tmp_path / name)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("fast", "stock")]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][name] == content for name, content in files[1].items() if name != "README.md")
    if isinstance(model, peft.PeftModel):
        loaded = peft.PeftModel.from_pretrained(full(), tmp_path / "fast", is_trainable=True)
    else:
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "fast", attn_implementation="eager").train()
    assert not any(is_patched(module) for module in loaded.modules())
    slothplug.patch(loaded)
    assert_same(step(loaded), step(stock))


def test_merged_and_unloaded_adapters() -> None:
    model, stock, _ = pair(lora)
    merged = [one.merge_and_unload() for one in (model, stock)]
    with torch.no_grad():
        torch.testing.assert_close(*(one(input_ids=IDS).logits for one in merged))
    for one in merged:
        one.requires_grad_(True)
    assert_same(step(merged[0]), step(merged[1]))
    slothplug.unpatch(merged[0])
    assert not any(is_patched(module) for module in merged[0].modules())
