"""The command as a user meets it: help, version, and errors without tracebacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import slothplug
from slothplug.cli import main, run

runner = CliRunner()


def test_version() -> None:
    assert runner.invoke(main.app, ["--version"]).output == f"slothplug {slothplug.__version__}\n"


def test_help_names_every_command() -> None:
    output = runner.invoke(main.app, ["--help"]).output
    assert all(command in output for command in ("demo", "doctor", "verify", "run"))


def test_help_imports_no_framework() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from slothplug.cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(sorted({'transformers', 'peft', 'trl', 'accelerate', 'matplotlib'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_an_unknown_command_is_refused() -> None:
    result = runner.invoke(main.app, ["domo"])
    assert result.exit_code == 2
    assert "domo" in result.output


def test_run_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def record(command: list[str]) -> int:
        seen.append(command)
        return 7

    monkeypatch.setattr(run, "run", record)
    command = ["python", "train.py", "--use_fast_kernels", "true", "--help", "-x", "--", "--nproc_per_node", "2"]
    assert runner.invoke(main.app, ["run", *command]).exit_code == 7
    assert seen == [command]


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)])
def test_run_explains_itself(arguments: list[str], code: int) -> None:
    done = runner.invoke(main.app, ["run", *arguments])
    assert done.exit_code == code
    assert "run COMMAND ..." in done.output
    assert "slothplug run python train.py --use_fast_kernels true" in done.output
    assert "slothplug run axolotl train cfg.yml" in done.output
