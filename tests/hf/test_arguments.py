"""``slothplug.integrations.hf.TrainingArguments``: parsed, serialised, and turned into a callback by the trainer."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import HfArgumentParser, Trainer

from slothplug import SettingsError
from slothplug.integrations.hf import FastKernelsCallback, TrainingArguments
from tests.hf.tiny import arguments, llama, patched_modules, rows


def _parse(folder: Path, *words: str) -> TrainingArguments:
    line = ["--output_dir", str(folder), "--use_cpu", "--report_to", "none", *words]
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)[0]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], False),
        (["--use_fast_kernels"], True),
        (["--use_fast_kernels", "true"], True),
        (["--use-fast-kernels", "true"], True),
        (["--use_fast_kernels", "false"], False),
        (["--use_fast_kernels", '{"skip_ops": ["rms_norm"]}'], {"skip_ops": ["rms_norm"]}),
    ],
)
def test_command_line(tmp_path: Path, words: list[str], value: object) -> None:
    assert _parse(tmp_path, *words).use_fast_kernels == value


def test_yaml_json_and_dict(tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    base = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nreport_to: none\nuse_fast_kernels:\n  strict: true\n"
    )
    (tmp_path / "run.json").write_text(json.dumps(base | {"use_fast_kernels": {"strict": True}}))
    assert parser.parse_yaml_file(tmp_path / "run.yaml")[0].use_fast_kernels == {"strict": True}
    assert parser.parse_json_file(tmp_path / "run.json")[0].use_fast_kernels == {"strict": True}
    assert parser.parse_dict(base | {"use_fast_kernels": True})[0].use_fast_kernels is True


def test_a_wrong_value_is_refused_before_a_model_exists(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Did you mean 'keep_logits'"):
        arguments(tmp_path, TrainingArguments, use_fast_kernels={"keep_logit": True})
    with pytest.raises(SettingsError, match="Use true, false"):
        _parse(tmp_path, "--use_fast_kernels", "fast")


def test_serialises_as_the_stock_class_does(tmp_path: Path) -> None:
    args = arguments(tmp_path, TrainingArguments, use_fast_kernels={"strict": True})
    assert args.to_dict()["use_fast_kernels"] == {"strict": True}
    assert json.loads(args.to_json_string())["use_fast_kernels"] == {"strict": True}
    assert "use_fast_kernels" in args.to_sanitized_dict()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_hold_the_stock_class(tmp_path: Path, protocol: int) -> None:
    args = arguments(tmp_path, TrainingArguments, use_fast_kernels=True)
    data = pickle.dumps(args, protocol)
    assert b"slothplug" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is transformers.TrainingArguments
    assert loaded.__dict__.keys() == args.__dict__.keys()
    assert loaded.use_fast_kernels is True
    assert loaded.to_dict() == {key: value for key, value in args.to_dict().items() if key != "use_fast_kernels"}


def test_copies_stay_of_the_class(tmp_path: Path) -> None:
    args = arguments(tmp_path, TrainingArguments, use_fast_kernels={"strict": True})
    for duplicate in (copy.copy(args), copy.deepcopy(args)):
        assert type(duplicate) is TrainingArguments
        assert duplicate == args
    assert copy.deepcopy(args).use_fast_kernels is not args.use_fast_kernels


def test_training_args_bin_loads_without_slothplug(tmp_path: Path) -> None:
    torch.save(arguments(tmp_path, TrainingArguments, use_fast_kernels=True), tmp_path / "training_args.bin")
    script = (
        "import sys; sys.modules['slothplug'] = None\n"
        "import torch\n"
        f"args = torch.load({str(tmp_path / 'training_args.bin')!r}, weights_only=False)\n"
        "assert type(args).__module__ == 'transformers.training_args' and args.max_steps == 2, args\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_the_trainer_gets_the_callback_once(tmp_path: Path) -> None:
    args = arguments(tmp_path, TrainingArguments, use_fast_kernels={"backend": "torch"})
    mine = FastKernelsCallback(True)
    given = [mine]
    for callbacks in (None, [], given, [FastKernelsCallback]):
        trainer = Trainer(llama(), args, train_dataset=rows(4), callbacks=callbacks)
        ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, FastKernelsCallback)]
        assert len(ours) == 1
        assert (ours[0] is mine) == (callbacks is given)
        assert patched_modules(trainer.model)
    assert given == [mine]


def test_off_wraps_nothing_and_changes_no_model(tmp_path: Path) -> None:
    before = Trainer.__init__
    args = arguments(tmp_path, TrainingArguments, use_fast_kernels=False)
    assert Trainer.__init__ is before
    assert not patched_modules(Trainer(llama(), args, train_dataset=rows(4)).model)
