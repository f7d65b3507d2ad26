"""``FastKernelsCallback``: patches the model of the trainer that it is given to, and says what came of it."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slothplug.integrations.hf.throughput import Throughput
from slothplug.integrations.hf.token_statistics import reads_token_statistics
from slothplug.ops.head import record_statistics, trl_computes_the_loss
from slothplug.patching.compiled import is_compiled
from slothplug.patching.patch import patch, report_left
from slothplug.patching.report import Report, unpatch
from slothplug.patching.sites import Refusal
from slothplug.patching.unwrap import wrappers_and_core
from slothplug.settings import Settings

logger = logging.getLogger("slothplug")


class FastKernelsCallback(TrainerCallback):
    """Makes the trainer's model run on fused kernels.

    The model is patched when the trainer has been built, and again when training begins where it is another one by then
    (``model_init``), has got new modules (adapters) or a head of TRL's own, or the callback came late
    (``trainer.add_callback``). A reference model that the trainer holds (TRL's ``ref_model``) is patched when training
    begins. Models stay patched after training; ``callback.report.undo()`` makes the trained one what it was.

    Where the trainer will compile its model (``torch_compile``), the model is not patched, or given back where it was:
    a compiler is given the stock forwards, so nothing fused would run. The report and a warning say so.

    Args:
        settings: the flag's value: ``True``, a mapping of settings, or ``Settings``. With ``False`` nothing is done.
        padding_key: what the framework that drives this trainer calls the option that removes padding, for the line at
            the end of training; empty where it has none. By default the one of the trainer's arguments: ``packing`` or
            ``padding_free`` of TRL.

    Attributes:
        report: the report on the trained model; None until it was patched.
        reference_report: the report on the reference model; None where there is none.

    Raises:
        SettingsError: the flag or one of its settings is not valid.
    """

    def __init__(
        self,
        settings: bool | Mapping[str, Any] | Settings = True,
        padding_key: str | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.settings = Settings.from_flag(settings)
        self.padding_key = padding_key
        self.notes = tuple(notes)
        self.report: Report | None = None
        self.reference_report: Report | None = None
        self._seen: Seen | None = None
        self._throughput: Throughput | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: Any
    ) -> None:
        if self.settings is not None:
            _set_log_level(args)
            self._patch(model, self.settings, args)
            self.reference_report = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: Any
    ) -> None:
        if self.settings is None:
            return
        _set_log_level(args)
        if self._seen is None or self._seen.differs_from(model):
            self._patch(model, self.settings, args)
        elif self.report is not None and _head_was_replaced(self.report, model):
            self.report.undo()
            self._patch(model, self.settings, args)
        reference = getattr(_calling_trainer(), "ref_model", None)
        if reference is not None and self.reference_report is None:
            self.reference_report = patch(reference, self.settings)
        logger.info("%s", self.report)
        if self._throughput:  # of a run that ended by an exception
            self._throughput.finish()
        self._throughput = Throughput(model, args, self.padding_key)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._throughput:
            self._throughput.resume()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._throughput:
            self._throughput.mark()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self._throughput:
            self._throughput.leave_out()

    on_save = on_evaluate

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._throughput is None:
            return
        logger.info("slothplug: %s", self._throughput.finish())
        self._throughput = None
        if self.report and (self.report.idle() or any(s.calls.fallbacks or s.calls.remarks for s in self.report.fused)):
            logger.info("%s", self.report)
        elif self.report:
            for line in self.report.since_patched():
                logger.info("slothplug: %s", line)

    def _patch(self, model: nn.Module, settings: Settings, args: TrainingArguments) -> None:
        if refusal := _why_not_compiling(args):
            unpatch(model)
            self.report = report_left(model, settings, refusal)
        else:
            self.report = patch(model, settings)
            if reads_token_statistics(_calling_trainer()):
                self.report.notes.extend(record_statistics(model))
        self.report.notes.extend(self.notes)
        self._seen = Seen(model)


class Seen:
    """What a model consisted of when it was last patched."""

    def __init__(self, model: nn.Module) -> None:
        core = wrappers_and_core(model)[1]
        self._core = weakref.ref(core)
        self._modules = _identities(core)

    def differs_from(self, model: nn.Module) -> bool:
        """Whether ``model`` is another one, or has other modules, in a state in which these could be patched.

        Sharding replaces classes and parameters of a model. Modules that were patched before stay patched, and sharded
        modules cannot be probed.
        """
        core = wrappers_and_core(model)[1]
        if core is not self._core():
            return True
        return not _is_sharded(model) and _identities(core) != self._modules


def _head_was_replaced(report: Report, model: nn.Module) -> bool:
    """True if the fused head is not called any more: TRL's trainers give the model a head of their own."""
    fused = any(site.op == "head" for site in report.fused)
    return fused and not _is_sharded(model) and trl_computes_the_loss(wrappers_and_core(model)[1])


def _identities(core: nn.Module) -> list[tuple[int, type, bool]]:
    return [(id(module), type(module), is_compiled(module)) for module in core.modules()]


def _is_sharded(model: nn.Module) -> bool:
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not names.isdisjoint({"FullyShardedDataParallel", "FSDPModule"}) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def _why_not_compiling(args: TrainingArguments) -> Refusal | None:
    """Why the trainer's model will run compiled, and so is not patched; None where it will not."""
    served = "and a compiler is given the stock forward"
    if args.torch_compile:
        return Refusal(f"torch_compile is true, {served}; set it to false to have the model fused")
    trainer = _calling_trainer()
    plugin = getattr(trainer.accelerator.state, "dynamo_plugin", None) if trainer else None
    backend = getattr(plugin, "backend", None)
    if backend is None or backend.value == "NO":
        return None
    return Refusal(
        f"accelerate compiles the model (dynamo_backend {backend.value.lower()}), {served}; leave out "
        f"--dynamo_backend, or set dynamo_backend to no in accelerate's configuration, to have the model fused"
    )


def _calling_trainer() -> Trainer | None:
    """The trainer whose event is being handled.

    Events carry the model and not the trainer, and TRL builds the reference model after ``on_init_end``; so the trainer
    is looked for where it must be: it is the ``self`` of one of the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None


def _set_log_level(args: TrainingArguments) -> None:
    """Shows the package's INFO lines on the processes that log, as transformers shows its own, unless the user decided.

    ``log_level`` of the arguments is obeyed where it was set; a logger that was configured is left as it is.
    """
    if logger.level != logging.NOTSET:
        return
    if args.log_level != "passive":
        logger.setLevel(args.get_process_log_level())
    else:
        logger.setLevel(logging.INFO if args.should_log else logging.WARNING)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
