"""``slothplug autoload``: a start-up hook that comes and goes without a trace, and is found by the uninstaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import Environment

pytest.importorskip("hatchling")

HOOK = "slothplug-autoload.pth"
FINDERS = "import sys; print([type(finder).__name__ for finder in sys.meta_path].count('DoorFinder'))"
LOADED = "import sys; print(sorted({'slothplug', 'torch', 'transformers', 'pluggy'} & set(sys.modules)))"
PARSED = "from transformers import TrainingArguments; print(hasattr(TrainingArguments, 'use_fast_kernels'))"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("autoload"))
    environment.install()
    return environment


def record(environment: Environment) -> str:
    (path,) = environment.packages.glob("slothplug-*.dist-info/RECORD")
    return path.read_text()


def test_on_and_off(environment: Environment) -> None:
    before = record(environment)
    assert environment.run("python", "-c", FINDERS).stdout == "0\n"
    assert environment.run("python", "-c", PARSED).stdout == "False\n"

    for _ in range(2):
        assert "autoload is on" in environment.run("slothplug", "autoload", "on").stdout
    assert record(environment) == f"{before}{HOOK},,\n"
    assert environment.run("python", "-c", FINDERS).stdout == "1\n"
    assert environment.run("slothplug", "run", "python", "-c", FINDERS).stdout == "1\n"
    quiet = environment.run("python", "-W", "error", "-X", "dev", "-c", LOADED)
    assert (quiet.stdout, quiet.stderr) == ("[]\n", "")
    assert environment.run("python", "-c", PARSED).stdout == "True\n"

    assert "autoload is off" in environment.run("slothplug", "autoload", "off").stdout
    assert "autoload is off" in environment.run("slothplug", "autoload", "status").stdout
    assert record(environment) == before
    assert not (environment.packages / HOOK).exists()


def test_uninstalling_leaves_nothing(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    before = {path.name for path in environment.packages.iterdir()}
    environment.install()
    environment.run("slothplug", "autoload", "on")
    hook = (environment.packages / HOOK).read_text()
    environment.pip("uninstall", "--yes", "slothplug")
    assert {path.name for path in environment.packages.iterdir()} == before
    done = environment.run("python", "-c", "pass")
    assert (done.stdout, done.stderr) == ("", "")

    # A hook that was left behind, as by deleting the package by hand, does nothing.
    (environment.packages / HOOK).write_text(hook)
    done = environment.run("python", "-c", FINDERS)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_where_no_hook_would_be_read_it_says_so(environment: Environment, tmp_path: Path) -> None:
    environment.pip("install", "--no-deps", "--no-index", "--target", str(tmp_path), str(environment.wheel))
    command = ["python", "-m", "slothplug.cli.main", "autoload", "on"]
    done = environment.run(*command, PYTHONPATH=str(tmp_path), check=False)
    assert done.returncode == 2
    assert "no folder whose .pth files Python reads" in " ".join(done.stderr.split())
    assert not (tmp_path / HOOK).exists()
