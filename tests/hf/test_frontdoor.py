"""The front door: every class of arguments takes the flag, and all is put back."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from slothplug import SettingsError, UndoError
from slothplug.integrations.hf import FastKernelsCallback, frontdoor
from tests.hf.tiny import arguments, llama, patched_modules, rows


@dataclasses.dataclass
class Earlier(TrainingArguments):
    extra: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extra += 1


class Undecorated(TrainingArguments):
    """Derived, with an ``__init__`` of its own, and no dataclass."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)


def _snapshot() -> dict[str, object]:
    classes = [TrainingArguments, Seq2SeqTrainingArguments, Earlier, Undecorated, Trainer]
    seen: dict[str, object] = {}
    for cls in classes:
        for key, value in cls.__dict__.items():
            seen[f"{cls.__name__}.{key}"] = dict(value) if isinstance(value, dict) else value
    return seen


def test_uninstall_puts_back_everything() -> None:
    before = _snapshot()
    frontdoor.install()
    frontdoor.install()
    assert _snapshot() != before
    frontdoor.uninstall()
    assert _snapshot() == before
    frontdoor.uninstall()


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments, Earlier, Undecorated])
def test_existing_classes_take_the_flag(tmp_path: Path, cls: type[TrainingArguments]) -> None:
    frontdoor.install()
    assert arguments(tmp_path, cls).use_fast_kernels is False
    args = arguments(tmp_path, cls, use_fast_kernels='{"strict": true}')
    assert args.use_fast_kernels == {"strict": True}
    assert args.to_dict()["use_fast_kernels"] == {"strict": True}
    assert pickle.loads(pickle.dumps(args)).use_fast_kernels == {"strict": True}
    if cls is not Undecorated:
        assert dataclasses.replace(args, max_steps=9).use_fast_kernels == {"strict": True}
    with pytest.raises(SettingsError, match="Did you mean 'strict'"):
        arguments(tmp_path, cls, use_fast_kernels={"strickt": True})


def test_later_classes_inherit_it(tmp_path: Path) -> None:
    frontdoor.install()

    @dataclasses.dataclass
    class Later(Earlier):
        more: str = "x"

    args = arguments(tmp_path, Later, use_fast_kernels="true", more="y")
    assert (args.use_fast_kernels, args.more, args.extra) == (True, "y", 4)
    with pytest.raises(SettingsError):
        arguments(tmp_path, Later, use_fast_kernels="maybe")


@pytest.mark.parametrize("cls", [TrainingArguments, Earlier])
def test_the_command_line_knows_it(tmp_path: Path, cls: type[TrainingArguments]) -> None:
    frontdoor.install()
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--use_fast_kernels", '{"strict": true}']
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(line)
    assert args.use_fast_kernels == {"strict": True}
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(line[:-1])
    assert args.use_fast_kernels is True


def test_the_trainer_patches_its_model(tmp_path: Path) -> None:
    frontdoor.install()
    model, other = llama(), llama()
    trainer = Trainer(model, arguments(tmp_path, use_fast_kernels=True), None, rows(4))
    assert patched_modules(model)
    assert not patched_modules(other)
    assert sum(isinstance(one, FastKernelsCallback) for one in trainer.callback_handler.callbacks) == 1
    off = llama()
    Trainer(off, arguments(tmp_path), train_dataset=rows(4))
    assert not patched_modules(off)


def test_arguments_built_before_and_after_still_work(tmp_path: Path) -> None:
    early = arguments(tmp_path)
    frontdoor.install()
    Trainer(llama(), early, train_dataset=rows(4))
    late = arguments(tmp_path, use_fast_kernels=True)
    frontdoor.uninstall()
    model = llama()
    Trainer(model, late, train_dataset=rows(4))
    assert not patched_modules(model)


def test_uninstall_refuses_where_somebody_wrapped_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    frontdoor.install()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", lambda self: None)
        with pytest.raises(UndoError, match=r"Trainer\.__init__ was replaced"):
            frontdoor.uninstall()
    frontdoor.uninstall()


def test_importing_and_patching_open_no_door() -> None:
    script = (
        "import transformers\n"
        "from transformers import Trainer, TrainingArguments\n"
        "def seen():\n"
        "    fields = dict(TrainingArguments.__dataclass_fields__)\n"
        "    return [dict(vars(cls)) for cls in (Trainer, TrainingArguments)], fields\n"
        "before = seen()\n"
        "import slothplug, slothplug.integrations.hf\n"
        "from slothplug.integrations.hf import FastKernelsCallback, frontdoor\n"
        "from tests.hf.tiny import llama\n"
        "FastKernelsCallback(); slothplug.patch(llama())\n"
        "assert seen() == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_every_argument_class_of_transformers_is_reached() -> None:
    frontdoor.install()
    assert {"use_fast_kernels"} <= set(transformers.Seq2SeqTrainingArguments.__dataclass_fields__)
