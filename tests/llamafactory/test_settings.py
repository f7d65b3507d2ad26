"""The flags in LLaMA-Factory's arguments: every way to write them, and what is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import get_train_args, parser
from llamafactory.train import tuner

from slothplug import ConflictError, Settings, SettingsError
from slothplug.integrations.hf import frontdoor as transformers_door
from slothplug.integrations.llamafactory import arguments, command, frontdoor, run_exp
from slothplug.integrations.llamafactory.translation import READ_LOGITS, STAGES_WITH_LOSS, inference_of, training_of
from slothplug.settings import FLAG
from tests.llamafactory.runs import LORA, STAGES, assert_equal, configuration, train, write

EVERY_SETTING = {
    "ops": ["lora", "head", "glu"], "skip_ops": ["glu"], "backend": "torch", "strict": True, "verify": True,
    "lora_precision": "compute", "keep_logits": True, "loss_chunk_mib": 64,
    "checkpointing": "off", "graphs": "off", "graph_shapes": 4, "graph_after": 3, "graph_padding": False,
}  # fmt: skip
UNSLOTH = "use_unsloth"


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> Iterator[None]:
    """As under ``slothplug run``."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(tuner, "run_exp", tuner.run_exp)
    monkeypatch.setattr(parser, "get_infer_args", parser.get_infer_args)
    transformers_door.install()
    frontdoor.open_training(tuner.run_exp)
    frontdoor.open_inference(parser.get_infer_args)
    yield
    transformers_door.uninstall()


@pytest.fixture
def unsloth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth as far as LLaMA-Factory looks before it imports it: a distribution of that name."""
    folder = tmp_path / "unsloth-2026.1.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 2026.1.1\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What the training arguments hold under the flag, for this command line of ``train``; no model is loaded."""

    def parse(*words: str) -> Any:
        seen = []

        def no_training(config: dict[str, Any]) -> None:
            seen.append((get_train_args(config["args"]), config["callbacks"]))

        monkeypatch.setattr(tuner, "_training_function", no_training)
        monkeypatch.setattr("sys.argv", ["train", *words])
        tuner.run_exp()
        (model_args, _, training_args, *_), callbacks = seen[0]
        assert not model_args.use_unsloth
        assert [callback.settings for callback in callbacks] == [
            Settings.from_flag(flag) for flag in [training_args.use_fast_kernels] if flag
        ]
        return training_args.use_fast_kernels

    return parse


def words(**keys: Any) -> list[str]:
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


@pytest.mark.usefixtures("doors")
def test_every_way_to_write_the_flag(workplace: Path, parsed: Callable[..., Any]) -> None:
    keys = STAGES["sft"] | LORA
    plain = configuration(workplace, "written", **keys)
    file = write(workplace, "written", **keys).name
    strict = {"strict": True, "skip_ops": ["rotary"]}
    assert parsed(file) is False
    assert parsed(write(workplace, "yaml", **keys, use_fast_kernels=True).name) is True
    assert parsed(write(workplace, "yaml", **keys, use_fast_kernels=strict).name) == strict
    assert parsed(write(workplace, "yaml", **keys, use_fast_kernels=False).name) is False
    assert parsed(write(workplace, "yaml", **keys, use_fast_kernels=True).name, "use_fast_kernels=false") is False
    assert parsed(file, "use_fast_kernels=true") is True
    assert parsed(file, "use_fast_kernels.strict=true", "use_fast_kernels.skip_ops=[rotary]") == strict
    assert parsed(file, "use_unsloth=true") is True
    assert parsed(*words(**plain)) is False
    assert parsed(*words(**plain), "--use_fast_kernels") is True
    assert parsed(*words(**plain), "--use_fast_kernels", "true") is True
    assert parsed(*words(**plain), "--use-fast-kernels", "False") is False
    assert parsed("--use_fast_kernels", json.dumps(strict), *words(**plain)) == strict
    assert parsed(*words(**plain), "--use_unsloth", "true") is True
    assert parsed(*words(**plain), "--use_unsloth") is True
    assert parsed(*words(**plain), "--use_unsloth", "--use_fast_kernels", json.dumps(strict)) == strict


@pytest.mark.usefixtures("doors")
def test_help_shows_the_field(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train", "-h"])
    with pytest.raises(SystemExit) as ended:
        tuner.run_exp()
    assert ended.value.code == 0
    assert "--use_fast_kernels" in capsys.readouterr().out


def test_every_setting_reaches_the_run() -> None:
    assert EVERY_SETTING.keys() == Settings.model_fields.keys()
    for args in ({FLAG: EVERY_SETTING}, ["--use_fast_kernels", json.dumps(EVERY_SETTING)]):
        training = training_of(args)
        assert training.settings == Settings(**EVERY_SETTING)
        assert arguments.read(training.args, [FLAG, UNSLOTH]).keys() == {FLAG}


WRONG = [
    ({"strickt": True}, r"use_fast_kernels\.strickt is not a setting\. Did you mean 'strict'\?"),
    ({"loss_chunk_mib": 0}, r"use_fast_kernels\.loss_chunk_mib is 0: input should be greater"),
    (3, r"use_fast_kernels is 3 \(int\)\. Use true, false, or a mapping"),
    ({"skip_ops": ["rotery"]}, r"skip_ops names 'rotery', which is no operation here\. Did you mean 'rotary'\?"),
    ("maybe", r"use_fast_kernels is 'maybe'\. Use true, false, or settings as a JSON object"),
]


@pytest.mark.parametrize(("flag", "said"), WRONG, ids=[str(flag) for flag, _ in WRONG])
def test_what_is_wrong_is_said_before_anything_is_loaded(workplace: Path, doors: None, flag: object, said: str) -> None:
    keys = STAGES["sft"] | LORA | {"model_name_or_path": "no-such-model", "use_fast_kernels": flag}
    for entry in (run_exp, tuner.run_exp):
        with pytest.raises(SettingsError, match=said):
            entry(configuration(workplace, "wrong", **keys))


def test_our_command_says_what_is_wrong_in_a_sentence(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    path = write(workplace, "sentence", **STAGES["sft"], **LORA, use_fast_kernels={"strickt": True})
    monkeypatch.setattr("sys.argv", ["slothplug-llamafactory", "train", path.name])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: use_fast_kernels.strickt is not a setting.")


@pytest.mark.parametrize("key", ["use_fast_kernel", "fast_kernels"])
def test_a_misspelt_flag_fails_as_llamafactory_fails(workplace: Path, doors: None, key: str) -> None:
    for entry in (run_exp, tuner.run_exp):
        with pytest.raises(ValueError, match=rf"Some keys are not used by the HfArgumentParser: \['{key}'\]"):
            entry(configuration(workplace, "typo", **STAGES["sft"], **LORA, **{key: True}))


def test_without_the_launcher_llamafactory_refuses_the_key(workplace: Path) -> None:
    with pytest.raises(ValueError, match=r"not used by the HfArgumentParser: \['use_fast_kernels'\]"):
        tuner.run_exp(configuration(workplace, "stock", **STAGES["sft"], **LORA, use_fast_kernels=True))


def test_use_unsloth_is_served_where_unsloth_is_not_installed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = STAGES["sft"] | LORA
    on = train(workplace, "unsloth-on", run_exp, **keys, use_unsloth=True)
    off = train(workplace, "unsloth-off", tuner.run_exp, **keys)
    assert_equal(on, off)
    assert sum(on.fused.values()) == 24
    assert any("`use_unsloth: true` is served by slothplug" in note for note in on.callbacks[0].report.notes)
    assert "use_unsloth" not in (on.folder / "README.md").read_text()
    settings = training_of({UNSLOTH: True, FLAG: {"strict": True}}).settings
    assert settings == Settings(strict=True)


@pytest.mark.parametrize("args", [{UNSLOTH: True, FLAG: False}, ["--use_unsloth", "--use_fast_kernels", "false"]])
def test_use_unsloth_with_the_flag_off_stays_llamafactorys(args: Any) -> None:
    assert training_of(args) is None


@pytest.mark.usefixtures("unsloth")
def test_where_unsloth_is_installed_it_gets_its_key(workplace: Path) -> None:
    assert training_of({UNSLOTH: True}) is None
    assert inference_of({UNSLOTH: True}) == {UNSLOTH: True}
    assert training_of({FLAG: True}).settings == Settings()
    keys = STAGES["sft"] | LORA | {"model_name_or_path": "no-such-model", FLAG: True, UNSLOTH: True}
    with pytest.raises(
        ConflictError, match=r"both on, and Unsloth 2026.1.1 is installed.*Delete the line `use_unsloth"
    ):
        run_exp(configuration(workplace, "two", **keys))


@pytest.mark.parametrize("stage", STAGES)
def test_objectives_that_read_logits_keep_them(stage: str) -> None:
    for args in ({FLAG: True, "stage": stage}, ["--use_fast_kernels", "--stage", stage]):
        assert training_of(args).settings.keep_logits == (stage not in STAGES_WITH_LOSS)


@pytest.mark.parametrize("key", READ_LOGITS)
def test_losses_that_read_logits_keep_them(key: str) -> None:
    assert training_of({FLAG: True, key: True}).settings.keep_logits
    assert not training_of({FLAG: True, key: False}).settings.keep_logits
    assert training_of({FLAG: {"keep_logits": True}, key: True}).notes == ()


def test_arguments_as_words() -> None:
    given = ["--stage", "sft", "--use_fast_kernels", "--dataset", "a", "b", "--use-unsloth", "no"]
    assert arguments.read(given, ["stage", FLAG, UNSLOTH]) == {"stage": "sft", FLAG: True, UNSLOTH: "no"}
    assert arguments.without(given, FLAG) == ["--stage", "sft", "--dataset", "a", "b", "--use-unsloth", "no"]
    assert arguments.read(["--use_fast_tokenizer", "true"], [FLAG]) == {}


@pytest.mark.usefixtures("doors")
def test_inference_reads_a_configuration_that_names_unsloth() -> None:
    keys = {"model_name_or_path": "model", "template": "default", UNSLOTH: True}
    model_args, *_ = parser.get_infer_args(keys)
    assert not model_args.use_unsloth


def test_the_front_door_opens_once(doors: None) -> None:
    wrapped = tuner.run_exp
    frontdoor.open_training(wrapped)
    assert tuner.run_exp is wrapped
