"""``FastKernelsCallback`` in a ``Trainer``: when it patches, what it leaves alone, what it says."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import slothplug
from slothplug import NothingFusedError, NothingFusedWarning, SettingsError
from slothplug.integrations.hf import FastKernelsCallback
from slothplug.patching.served import STATE
from tests.hf.tiny import RecordingTrainer, arguments, llama, patched_modules, rows, with_lora


def _trainer(
    folder: Path,
    model: nn.Module | None,
    *callbacks: TrainerCallback,
    model_init: Callable[[], nn.Module] | None = None,
) -> RecordingTrainer:
    return RecordingTrainer(
        model,
        arguments(folder),
        train_dataset=rows(8),
        eval_dataset=rows(2),
        callbacks=list(callbacks),
        model_init=model_init,
    )


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate's process-wide state as a process of its own would have it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # transformers 4 sets it
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    # Accelerate lets float32 products be TF32 on a GPU where it compiles without mixed precision.
    torch.set_float32_matmul_precision("highest")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": llama,
    "peft": lambda: with_lora(llama()),
    "ddp": lambda: DistributedDataParallel(llama()),
    "ddp of peft": lambda: DistributedDataParallel(with_lora(llama())),
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_trainer_reads_from_the_model_stays(tmp_path: Path, kind: str, process_group: None) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/339, https://github.com/huggingface/transformers/issues/37766"""
    seen, losses = [], []
    for callbacks in ([], [FastKernelsCallback()]):
        model = MODELS[kind]()
        parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
        # The columns that the Trainer would keep are those of DDP.forward: none.
        args = arguments(tmp_path, gradient_accumulation_steps=2, remove_unused_columns="ddp" not in kind)
        trainer = RecordingTrainer(model, args, train_dataset=rows(8, "padded"), callbacks=callbacks)
        trainer._set_signature_columns_if_needed()
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        signatures = [inspect.signature(one.forward) for one in (model, trainer.accelerator.unwrap_model(model))]
        seen.append(
            (
                signatures,
                trainer._signature_columns,
                trainer.model_accepts_loss_kwargs,
                trainer.label_names,
                list(model.state_dict()),
                trainable,
                repr(model),
            )
        )
        trainer.train()
        losses.append(trainer.losses)
        assert bool(patched_modules(model)) == bool(callbacks)
    assert seen[0] == seen[1]
    assert trainer.model_accepts_loss_kwargs
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # micro-batches of unequal counts: by the batch's count


def test_patches_when_the_trainer_is_built_and_stays(tmp_path: Path) -> None:
    fast = FastKernelsCallback()
    model, other = llama(), llama()
    trainer = _trainer(tmp_path, model, fast)
    patched = patched_modules(model)
    report = fast.report
    assert report is not None
    layers = {name for name, part in model.named_modules() if type(part).__name__ == "LlamaDecoderLayer"}
    assert {site.name for site in report.fused} | layers | {""} >= set(patched)
    trainer.train()
    assert fast.report is report
    assert patched_modules(model) == patched
    assert all(site.calls.served for site in report.fused if site.op == "rms_norm")
    report.undo()
    assert not patched_modules(model)
    # https://github.com/unslothai/unsloth/issues/1713: another model of the class never changes
    assert not patched_modules(other)


def test_evaluate_without_training_is_served(tmp_path: Path) -> None:
    fast = FastKernelsCallback()
    metrics = _trainer(tmp_path, llama(), fast).evaluate()
    assert all(site.calls.served for site in fast.report.fused if site.op == "rms_norm")
    assert abs(metrics["eval_loss"] - _trainer(tmp_path, llama()).evaluate()["eval_loss"]) <= 1e-5


def test_model_init_patches_the_model_that_is_trained(tmp_path: Path) -> None:
    fast = FastKernelsCallback()
    trainer = _trainer(tmp_path, None, fast, model_init=lambda: llama())
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert patched_modules(trainer.model)
    assert all(site.calls.served for site in fast.report.fused if site.op == "rms_norm")
    stock = _trainer(tmp_path, None, model_init=lambda: llama())
    stock.train()
    assert trainer.losses == pytest.approx(stock.losses, abs=1e-5)


def test_a_late_callback_patches_when_training_begins(tmp_path: Path) -> None:
    fast = FastKernelsCallback()
    trainer = _trainer(tmp_path, llama())
    trainer.add_callback(fast)
    assert fast.report is None
    assert not patched_modules(trainer.model)
    trainer.train()
    assert fast.report.fused
    assert patched_modules(trainer.model)


def test_modules_that_came_after_the_trainer_are_served_too(tmp_path: Path) -> None:
    fast = FastKernelsCallback()
    trainer = _trainer(tmp_path, llama(), fast)
    trainer.model.model.layers[0].input_layernorm = type(trainer.model.model.norm).__mro__[1](32)
    before = fast.report
    trainer.train()
    assert fast.report is not before
    assert "model.layers.0.input_layernorm" in patched_modules(trainer.model)


def test_off_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast = FastKernelsCallback(False)
    model = llama()
    with caplog.at_level(logging.DEBUG, "slothplug"):
        trainer = _trainer(tmp_path, model, fast)
        trainer.train()
    assert fast.report is None
    assert not patched_modules(model)
    assert not caplog.records


def test_an_operation_that_is_none_is_refused_before_step_0(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Did you mean 'rms_norm'"):
        _trainer(tmp_path, llama(), FastKernelsCallback({"ops": ["rmsnorm"]}))


class NothingToFuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.embed(input_ids).square().mean()}


def test_nothing_fused_warns_once(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/34016: a flag that did nothing must say so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(tmp_path, NothingToFuse(), FastKernelsCallback()).train()
    assert len([one for one in caught if issubclass(one.category, NothingFusedWarning)]) == 1


def test_nothing_fused_raises_in_strict_mode(tmp_path: Path) -> None:
    with pytest.raises(NothingFusedError, match="no site was found"):
        _trainer(tmp_path, NothingToFuse(), FastKernelsCallback({"strict": True}))


def test_a_trainer_that_compiles_says_that_nothing_is_fused_before_step_0(
    tmp_path: Path, one_accelerator: None
) -> None:
    model, fast = llama(layers=1), FastKernelsCallback()
    slothplug.patch(model)  # as Axolotl's plugin does before the trainer is built
    # Without tf32=False transformers would allow TF32 for the rest of the process on a GPU.
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager", tf32=False)
    with pytest.warns(NothingFusedWarning, match="torch_compile is true"):
        trainer = Trainer(model, args, train_dataset=rows(8), callbacks=[fast])
    assert not patched_modules(model)
    assert not fast.report.fused
    assert {site.op for site in fast.report.left} == {"rms_norm", "rotary", "glu", "head"}
    trainer.train()
    assert not patched_modules(model)


def test_a_trainer_that_compiles_is_refused_in_strict_mode(tmp_path: Path, one_accelerator: None) -> None:
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager", tf32=False)
    with pytest.raises(NothingFusedError, match="torch_compile is true"):
        Trainer(llama(layers=1), args, train_dataset=rows(8), callbacks=[FastKernelsCallback({"strict": True})])


def test_accelerates_own_switch_compiles_too(
    tmp_path: Path, one_accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.warns(NothingFusedWarning, match="dynamo_backend eager"):
        Trainer(llama(layers=1), arguments(tmp_path), train_dataset=rows(8), callbacks=[FastKernelsCallback()])


def _lines(
    caplog: pytest.LogCaptureFixture, folder: Path, kind: str, fast: FastKernelsCallback, **options: object
) -> list[str]:
    caplog.clear()
    model = llama()
    args = arguments(folder, **({"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2} | options))
    trainer = Trainer(model, args, train_dataset=rows(8, kind), eval_dataset=rows(2), callbacks=[fast])
    trainer.train()
    assert not any(module._forward_pre_hooks for module in model.modules())
    lines = [record.getMessage() for record in caplog.records if record.name == "slothplug"]
    return [line for line in lines if not line.startswith("slothplug: graphs:")]  # a GPU's; see tests/graphs


def test_says_what_was_fused_and_how_training_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast = FastKernelsCallback(padding_key="neat_packing")
    summary, table, end = _lines(caplog, tmp_path, "padded", fast)
    assert summary == fast.report.summary()
    assert "rms_norm" in table
    # rows(8, "padded", 16) keep 16, 15, ... 9 tokens: 28 of 128 are padding
    assert "tokens/s, peak memory" in end
    assert "22% of the tokens were padding; neat_packing would remove it, for up to 1.3 times the speed" in end


def test_advises_nothing_where_nothing_removes_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = _lines(caplog, tmp_path, "padded", FastKernelsCallback(padding_key=""))[-1]
    assert end.endswith("22% of the tokens were padding")


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_says_nothing_about_padding_it_cannot_see(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    end = _lines(caplog, tmp_path, kind, FastKernelsCallback())[-1]
    assert "tokens/s" in end
    assert "padding" not in end


def test_obeys_log_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _lines(caplog, tmp_path, "full", FastKernelsCallback(), log_level="warning") == []


def test_counts_after_an_interrupted_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    fast, stop = FastKernelsCallback(), Stop()
    trainer = _trainer(tmp_path, llama(), fast, stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(stop)
    trainer.train()
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_notes_of_a_framework_stand_in_the_report(tmp_path: Path) -> None:
    callback = FastKernelsCallback(notes=["its own kernels are off"])
    _trainer(tmp_path, llama(), callback).train()
    assert callback.report is not None
    assert callback.report.notes.count("its own kernels are off") == 1


def test_what_may_be_decided_once_a_call_is_in_a_trainer_too(tmp_path: Path) -> None:
    """Its own hooks, and the callback's, change nothing in the model."""
    trainer = Trainer(llama(layers=1), arguments(tmp_path), train_dataset=rows(8), callbacks=[FastKernelsCallback()])
    bound = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            bound.append(model.__dict__[STATE].guard._binding is not None)

    trainer.add_callback(Note())
    trainer.train()
    assert bound
    assert all(bound)
