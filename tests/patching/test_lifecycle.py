"""A patch happens whole or not at all, says what holds, and survives whatever its surroundings do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.patching import verdicts
from slothplug.patching.private_class import is_patched
from slothplug.patching.proof import difference
from slothplug.patching.sites import Kernel
from tests.patching.device import DEVICE

pytestmark = pytest.mark.core

IDS = torch.arange(48).view(2, 24)


def adapted(model: nn.Module, **config: Any) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **config}))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.fixture
def plugin() -> Iterator[SimpleNamespace]:
    """A plugin whose hook after the patch refuses it, registered for one test."""

    @hookimpl
    def slothplug_after_patch(model: nn.Module, report: slothplug.Report) -> None:
        raise slothplug.ConflictError("a plugin refuses the patch")

    plugin = SimpleNamespace(slothplug_after_patch=slothplug_after_patch)
    slothplug.plugin_manager().register(plugin)
    yield plugin
    slothplug.plugin_manager().unregister(plugin)


def test_a_patch_that_raises_changes_nothing(tiny_llama: Callable[..., nn.Module], plugin: SimpleNamespace) -> None:
    model = adapted(tiny_llama())
    before = classes(model)
    with pytest.raises(slothplug.ConflictError, match="a plugin refuses the patch"):
        slothplug.patch(model)
    assert classes(model) == before


def test_strict_gives_the_wrappers_back_too(tiny_llama: Callable[..., nn.Module]) -> None:
    model = adapted(tiny_llama())
    norm = model.base_model.model.model.norm
    norm.forward = norm.forward
    before = classes(model)
    with pytest.raises(slothplug.NothingFusedError, match=r"1 of rms_norm.*skip_ops: \[rms_norm\]"):
        slothplug.patch(model, {"strict": True})
    assert classes(model) == before


def test_other_settings_are_refused_and_named(tiny_llama: Callable[..., nn.Module]) -> None:
    """A second patch with other settings would leave the first's in force and report its own."""
    model = tiny_llama()
    slothplug.patch(model)
    before = classes(model)
    with pytest.raises(slothplug.ConflictError, match=r"is patched with use_fast_kernels: True.*keep_logits.*unpatch"):
        slothplug.patch(model, {"keep_logits": True})
    assert classes(model) == before
    slothplug.unpatch(model)
    assert slothplug.patch(model, {"keep_logits": True}).fused


def test_a_with_block_leaves_an_earlier_patch_in_place(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    slothplug.patch(model)
    before = classes(model)
    with slothplug.fast_kernels(model) as report:
        assert report.fused
    assert classes(model) == before


def test_a_probe_that_could_not_run_is_tried_again(
    tiny_llama: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is full at one patch is free at the next."""
    monkeypatch.setattr(verdicts, "_verdicts", {})
    failing = True

    def prove(*args: Any) -> str | None:
        if failing:
            raise torch.OutOfMemoryError("no memory")
        return difference(*args)

    monkeypatch.setattr("slothplug.ops.rms_norm.probe.difference", prove)
    report = slothplug.patch(tiny_llama(), {"ops": ["rms_norm", "glu"]})
    assert {site.op for site in report.fused} == {"glu"}
    assert all("its probe failed: OutOfMemoryError" in site.reason for site in report.left)
    failing = False
    assert not slothplug.patch(tiny_llama(), {"ops": ["rms_norm", "glu"]}).left


def test_the_callers_modes_do_not_decide(tiny_llama: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_verdicts", {})
    expected = [(site.op, site.status) for site in slothplug.patch(tiny_llama()).sites]
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16)):
        model = tiny_llama()
        monkeypatch.setattr(verdicts, "_verdicts", {})
        with mode:
            report = slothplug.patch(model)
        assert [(site.op, site.status) for site in report.sites] == expected


def test_tf32_does_not_decide(tiny_llama: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl allows it wherever the GPU has it. The head's proof failed: its loss multiplies in another order."""
    monkeypatch.setattr(verdicts, "_verdicts", {})
    allowed: list[bool] = []

    def prove(*args: Any) -> str | None:
        allowed.append(torch.backends.cuda.matmul.allow_tf32)
        return difference(*args)

    monkeypatch.setattr("slothplug.ops.head.probe.difference", prove)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        report = slothplug.patch(tiny_llama())
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert not report.left
    assert allowed
    assert not any(allowed)


def test_an_adapter_on_the_head_is_the_heads(tiny_llama: Callable[..., nn.Module]) -> None:
    report = slothplug.patch(adapted(tiny_llama(), target_modules=["q_proj", "lm_head"]))
    (head,) = report.by_op()["head"]
    (left,) = report.left
    assert (head.status, left.op, left.name, left.excused) == ("fused", "lora", head.name, True)


def test_a_class_above_ours_pickles_as_it_would_on_a_stock_module(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    slothplug.patch(model)
    norm = model.model.norm
    norm.__class__ = type("Above", (type(norm),), {"__module__": __name__})
    globals()["Above"] = type(norm)
    try:
        assert "_slothplug" not in pickle.loads(pickle.dumps(norm)).__dict__
    finally:
        del globals()["Above"]


def test_every_action_at_the_end_of_a_call_runs(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    slothplug.patch(model)
    ran = []

    def record(module: nn.Module, args: object) -> None:
        from slothplug.patching.forward_context import current_forward

        call = current_forward(module.__dict__["_slothplug"].context)
        assert call is not None
        call.at_end[:0] = [lambda: 1 / 0, lambda: ran.append("second")]

    model.model.norm.register_forward_pre_hook(record)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=IDS, labels=IDS)
    assert ran == ["second"]


def test_verify_false_is_said(tiny_llama: Callable[..., nn.Module]) -> None:
    report = slothplug.patch(tiny_llama(), {"verify": False})
    assert any("without a probe" in note for note in report.notes)


def test_nothing_is_left_patched_after_undo(tiny_llama: Callable[..., nn.Module]) -> None:
    model = adapted(tiny_llama())
    slothplug.patch(model).undo()
    assert not any(is_patched(module) for module in model.modules())


@pytest.mark.parametrize("which", [0, 1])
def test_the_wrapper_of_a_second_patch_is_given_back_by_either_report(
    tiny_llama: Callable[..., nn.Module], which: int
) -> None:
    base = tiny_llama()
    first = slothplug.patch(base)
    model = adapted(base)
    second = slothplug.patch(model)
    assert is_patched(model)
    (first, second)[which].undo()
    assert not any(is_patched(module) for module in model.modules())
    assert "_slothplug" not in "".join(key for module in model.modules() for key in vars(module))


def test_undoing_a_part_leaves_the_rest_patched(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    slothplug.patch(model)
    slothplug.unpatch(model.model.layers[0])
    assert not any(is_patched(module) for module in model.model.layers[0].modules())
    assert is_patched(model)
    assert is_patched(model.model.norm)


def test_a_verdict_is_not_inherited_by_another_kernel_of_the_same_name(tiny_llama: Callable[..., nn.Module]) -> None:
    assert slothplug.patch(tiny_llama(), {"ops": ["rms_norm"], "backend": "torch"}).fused

    @hookimpl
    def slothplug_kernel(operation: str) -> Kernel | None:
        return Kernel("rms_norm", "torch", lambda x, *_, **__: x * 0) if operation == "rms_norm" else None

    plugin = SimpleNamespace(slothplug_kernel=slothplug_kernel)
    slothplug.plugin_manager().register(plugin)
    try:
        report = slothplug.patch(tiny_llama(), {"ops": ["rms_norm", "glu"], "backend": "torch"})
    finally:
        slothplug.plugin_manager().unregister(plugin)
    assert {site.op for site in report.fused} == {"glu"}
