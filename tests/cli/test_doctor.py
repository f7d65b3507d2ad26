"""The doctor names what is wrong and the command that mends it, and its status says whether training would work."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from slothplug.cli import doctor
from slothplug.cli.main import app
from slothplug.versions import PACKAGES

runner = CliRunner(env={"COLUMNS": "160"})
BY_NAME = {package.name: package for package in PACKAGES}


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", without)


def test_here_training_works() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for words in (
        "transformers",
        "slothplug.rms_norm",
        "operation rms_norm",
        "RMS normalisation in one pass",
        "backend on",
        "training step",
        "rms_norm 3/3",
        "Ready to train.",
    ):
        assert words in result.output


def test_what_training_needs_and_is_missing_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "accelerate", "peft", "trl")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install 'accelerate>=1.1'" in result.output
    assert "pip install 'peft>=0.18,<0.22'" in result.output
    assert "not tried" in result.output


def test_what_is_optional_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda device: "fine")
    hide(monkeypatch, "peft", "trl", "bitsandbytes", "axolotl", "llamafactory", "triton")
    assert runner.invoke(app, ["doctor"]).exit_code == 0


def test_a_training_step_that_fails_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> str:
        raise ArithmeticError("the loss of the first step is nan")

    monkeypatch.setattr(doctor, "self_test", fails)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "ArithmeticError: the loss of the first step is nan" in result.output


@pytest.mark.parametrize(
    ("name", "version", "state", "words"),
    [
        ("transformers", "4.56.2", "broken", "older than 4.57"),
        ("transformers", "4.57.0", "ok", ""),
        ("transformers", "5.24.1", "ok", ""),
        ("transformers", "5.25.0", "untested", "newer than 5.24"),
        ("transformers", "5.24.0.dev0", "ok", ""),
        ("peft", "0.17.1", "broken", "older than 0.18"),
        ("peft", "0.21.9", "ok", ""),
        ("peft", "0.22.0", "untested", "pip install 'peft>=0.18,<0.22'"),
        ("trl", "0.1", "ok", ""),
    ],
)
def test_versions_are_judged_by_their_minor_release(name: str, version: str, state: str, words: str) -> None:
    finding = doctor.judge(BY_NAME[name], version)
    assert finding.state == state
    assert words in finding.advice
