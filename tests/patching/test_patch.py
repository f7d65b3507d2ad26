"""The patch layer as a whole: one model changes and nothing else does; copies, pickles and undo."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.patching.private_class import is_patched, stock_class
from tests.backward_calls import count_backward

IDS = torch.arange(48).view(2, 24)


def anatomy(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    """Every module's class and ``__dict__``, containers copied one level deep."""

    def shallow(value: Any) -> Any:
        return value.copy() if isinstance(value, dict) else value

    return [(type(m), {key: shallow(value) for key, value in m.__dict__.items()}) for m in model.modules()]


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and every gradient of one training step."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got: tuple, expected: tuple) -> None:
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    for name in expected[1]:
        torch.testing.assert_close(got[1][name], expected[1][name], rtol=1e-4, atol=2e-6, msg=name)


def test_a_patched_model_trains_with_stock_numbers_on_fused_kernels(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    expected = step(tiny_llama())
    report = slothplug.patch(model)
    count_backward(report)
    assert_same_step(step(model), expected)
    assert {site.op for site in report.fused} >= {"rms_norm", "glu", "rotary", "head"}
    for site in report.fused:
        assert site.calls.served, site.name
        assert site.calls.backward, site.name
        assert not site.calls.fallbacks, site.name


def test_undo_makes_every_module_what_it_was(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    before, expected = anatomy(model), model(input_ids=IDS).logits
    report = slothplug.patch(model)
    step(model)
    model.zero_grad(set_to_none=True)
    assert any(is_patched(module) for module in model.modules())
    report.undo()
    assert anatomy(model) == before
    assert torch.equal(model(input_ids=IDS).logits, expected)
    report.undo()  # twice is harmless
    slothplug.unpatch(tiny_llama())  # so is a model that never was patched


def test_a_with_block_ends_in_the_stock_model_also_by_an_exception(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    before = anatomy(model)
    with pytest.raises(RuntimeError, match="interrupted"):
        interrupted(model)
    assert anatomy(model) == before


def interrupted(model: nn.Module) -> None:
    with slothplug.fast_kernels(model) as report:
        assert report.fused
        raise RuntimeError("interrupted")


def test_patching_twice_changes_nothing_the_second_time(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    first = slothplug.patch(model)
    classes = [type(m) for m in model.modules()]
    second = slothplug.patch(model)
    assert [type(m) for m in model.modules()] == classes
    assert [(s.op, s.name, s.status) for s in first.sites] == [(s.op, s.name, s.status) for s in second.sites]
    step(model)
    assert [s.calls.served for s in second.fused] == [s.calls.served for s in first.fused]
    second.undo()
    assert not any(is_patched(m) for m in model.modules())


def test_only_the_given_model_changes(tiny_llama: Callable[..., nn.Module]) -> None:
    """https://github.com/unslothai/unsloth/issues/1713: classes replaced process-wide reached other models."""
    before, target = tiny_llama(), tiny_llama()
    globals_before = snapshot_of_libraries()
    report = slothplug.patch(target)
    after = tiny_llama()
    for other in (before, after):
        assert not any(is_patched(module) for module in other.modules())
        assert type(other).forward is stock_class(target).forward
    step(target)
    assert snapshot_of_libraries() == globals_before
    report.undo()
    assert snapshot_of_libraries() == globals_before


def snapshot_of_libraries() -> dict[str, int]:
    """Identity of every global, and of every class attribute, in the loaded modules of torch, transformers and peft."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in {"torch", "transformers", "peft"} or module is None:
            continue
        if not module_name.startswith(("torch.nn", "transformers.m", "transformers.trainer", "peft")):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{module_name}.{key}"] = id(value)
            if inspect.isclass(value) and value.__module__ == module_name:
                for name, member in list(vars(value).items()):
                    if callable(member) and name not in {"_abc_impl"}:
                        found[f"{module_name}.{key}.{name}"] = id(member)
    return found


def test_signature_and_names_stay(tiny_llama: Callable[..., nn.Module]) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/339: a patched signature switched the Trainer's token count off."""
    model = tiny_llama()
    signature, names, keys = inspect.signature(model.forward), repr(model), list(model.state_dict())
    slothplug.patch(model)
    assert inspect.signature(model.forward) == signature
    assert repr(model) == names
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_deep_copy_keeps_the_patch_and_uses_its_own_weights(tiny_llama: Callable[..., nn.Module]) -> None:
    """https://github.com/unslothai/unsloth/pull/8344: a deep copy kept calling the original's weights."""
    model = tiny_llama()
    slothplug.patch(model)
    double = copy.deepcopy(model)
    assert is_patched(double.model.norm)
    expected = step(model)
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.mul_(0.5)
    reference = tiny_llama()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    assert_same_step(step(double), step(reference))
    assert_same_step(step(model), expected)
    slothplug.unpatch(double)
    assert not any(is_patched(module) for module in double.modules())
    assert is_patched(model.model.norm)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_files_hold_the_stock_model_and_load_where_slothplug_is_absent(
    how: str, tiny_llama: Callable[..., nn.Module], tmp_path: Any
) -> None:
    model = tiny_llama()
    expected = step(model)[0].item()
    slothplug.patch(model)
    path = tmp_path / "model.bin"
    if how == "pickle":
        path.write_bytes(pickle.dumps(model))
        load = "pickle.load(open(path, 'rb'))"
    else:
        torch.save(model, path)
        load = "torch.load(path, weights_only=False)"
    assert is_patched(model.model.norm)
    script = f"""
        import pickle, sys
        sys.modules["slothplug"] = None
        import torch
        path = {str(path)!r}
        model = {load}
        ids = torch.arange(48, device=model.device).view(2, 24)
        print(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(expected, abs=1e-6)


def test_a_patched_module_pickles_alone(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    slothplug.patch(model)
    norm = pickle.loads(pickle.dumps(model.model.norm))
    assert type(norm) is stock_class(model.model.norm)
    assert "_slothplug" not in norm.__dict__
    buffer = io.BytesIO()
    torch.save(model.model.layers, buffer)


def test_same_parameters_and_an_optimizer_made_before_keep_working(tiny_llama: Callable[..., nn.Module]) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/279: patching swapped modules without their weights."""
    model, stock = tiny_llama(), tiny_llama()
    identities = [id(p) for p in model.parameters()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, stock)]
    slothplug.patch(model)
    assert [id(p) for p in model.parameters()] == identities
    for _ in range(3):
        for m, optimizer in zip((model, stock), optimizers, strict=True):
            step(m)
            optimizer.step()
    assert_same_step(step(model), step(stock))


def test_a_model_on_meta_is_refused(tiny_llama: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(slothplug.UnsupportedModelError, match="'meta'"):
        slothplug.patch(model)


def test_a_model_without_sites_warns_and_strict_raises() -> None:
    """https://github.com/huggingface/transformers/issues/34016: flag on, nothing patched, nobody told."""
    with pytest.warns(slothplug.NothingFusedWarning, match="nothing in Sequential could be fused"):
        slothplug.patch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(slothplug.NothingFusedError, match="no site was found"):
        slothplug.patch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"strict": True})


def test_strict_leaves_the_model_as_it_was(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    model.model.norm.forward = model.model.norm.forward  # somebody's instance forward
    before = anatomy(model)
    with pytest.raises(slothplug.NothingFusedError, match=r"rms_norm at model\.norm .*replaced on the instance"):
        slothplug.patch(model, {"strict": True})
    assert anatomy(model) == before


def test_the_probe_touches_neither_rng_nor_buffers_nor_grads(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    step(model)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    versions = {name: p._version for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    slothplug.patch(model)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, grads[name])
        assert p._version == versions[name]
    for name, b in model.named_buffers():
        assert torch.equal(b, buffers[name])


def test_false_patches_nothing(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    before = anatomy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = slothplug.patch(model, False)
    assert anatomy(model) == before
    assert not report.sites


def test_the_report_reads_as_a_table_a_mapping_and_a_line(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    model.model.norm.forward = model.model.norm.forward
    report = slothplug.patch(model)
    step(model)
    text = str(report)
    assert "rms_norm" in text
    assert "left: rms_norm at model.norm - LlamaRMSNorm: its forward was replaced on the instance" in text
    data = report.to_dict()
    assert data["operations"]["rms_norm"] == {"found": 5, "fused": 4, "left": 1}
    assert report.summary().startswith("slothplug: rms_norm 4/5 (torch)") or "rms_norm 4/5" in report.summary()


def test_a_ddp_wrapped_model_is_patched_inside(tiny_llama: Callable[..., nn.Module], tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, expected = tiny_llama(), step(tiny_llama())
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        report = slothplug.patch(wrapped)
        assert report.fused
        loss, grads = step(wrapped)
        assert_same_step((loss, {name.removeprefix("module."): g for name, g in grads.items()}), expected)
        report.undo()
        assert not any(is_patched(m) for m in wrapped.modules())
    finally:
        torch.distributed.destroy_process_group()


class DeepSpeedEngine(nn.Module):
    """Holds and calls the model as DeepSpeed's engine of that name does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class DeepSpeedHybridEngine(DeepSpeedEngine):
    pass


@pytest.mark.parametrize("engine", [DeepSpeedEngine, DeepSpeedHybridEngine])
def test_a_model_is_patched_inside_deepspeeds_engine(
    tiny_llama: Callable[..., nn.Module], engine: type[DeepSpeedEngine]
) -> None:
    model, expected = tiny_llama(), step(tiny_llama())
    wrapped = engine(model)
    report = slothplug.patch(wrapped)
    assert is_patched(model)
    assert type(wrapped) is engine
    loss, grads = step(wrapped)
    assert_same_step((loss, {name.removeprefix("module."): g for name, g in grads.items()}), expected)
    (head,) = report.by_op()["head"]
    assert (head.calls.served, head.calls.fallbacks) == (1, {})
    report.undo()
    assert not any(is_patched(m) for m in wrapped.modules())


def test_undo_refuses_where_another_class_was_put_above_ours(tiny_llama: Callable[..., nn.Module]) -> None:
    """``fully_shard`` and parametrizations subclass whatever class a module has at that moment."""
    model = tiny_llama()
    report = slothplug.patch(model)
    torch.nn.utils.parametrize.register_parametrization(model.model.norm, "weight", nn.Identity())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(slothplug.UndoError, match="was put above a class of slothplug's"):
        report.undo()
    assert [type(module) for module in model.modules()] == classes
