"""``slothplug run``: a script that knows nothing of slothplug understands the flag, in every process below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# By its path, since importing the package takes seconds, and the launcher needs nothing of it.
LAUNCHER = (
    f"import runpy, sys\nsys.exit(runpy.run_path({str(REPOSITORY / 'slothplug/cli/run.py')!r})['run'](sys.argv[1:]))"
)
TORCHRUN = Path(sysconfig.get_path("scripts")) / "torchrun"

SCRIPT = """
import os, sys
sys.path.insert(0, {repository!r})
from dataclasses import dataclass
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.hf.tiny import llama, rows

@dataclass
class Mine:
    layers: int = 1

mine, args = HfArgumentParser((Mine, TrainingArguments)).parse_args_into_dataclasses()
model = llama(layers=mine.layers)
trainer = Trainer(model, args, train_dataset=rows(8))
trainer.train()
fused = [name for name, module in model.named_modules() if "_slothplug" in module.__dict__]
print("RANK", os.environ.get("RANK", "-"), "fused", bool(fused), "flag", args.use_fast_kernels)
sys.exit(7 if mine.layers == 7 else 0)
"""


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    inherited = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, *command], capture_output=True, text=True, timeout=500, env=inherited
    )


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(repository=str(REPOSITORY)))
    return [
        str(path), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--report_to", "none",
        "--max_steps", "1", "--save_strategy", "no", "--per_device_train_batch_size", "2",
    ]  # fmt: skip


def test_python_script(script: list[str]) -> None:
    done = _run(sys.executable, *script, "--use_fast_kernels", "true")
    assert done.returncode == 0, done.stderr
    assert "RANK - fused True flag True" in done.stdout
    assert "rms_norm" in done.stderr
    assert "tokens/s" in done.stderr


@pytest.mark.slow
def test_without_the_flag_nothing_is_patched(script: list[str]) -> None:
    done = _run(sys.executable, *script)
    assert done.returncode == 0, done.stderr
    assert "fused False flag False" in done.stdout


@pytest.mark.slow
def test_a_wrong_setting_stops_the_script_at_its_arguments(script: list[str]) -> None:
    done = _run(sys.executable, *script, "--use_fast_kernels", '{"strickt": true}')
    assert done.returncode == 1
    assert "Did you mean 'strict'?" in done.stderr


@pytest.mark.slow
def test_torchrun_workers_inherit_it(script: list[str]) -> None:
    done = _run(str(TORCHRUN), "--nproc_per_node", "2", *script, "--use_fast_kernels", "--ddp_backend", "gloo")
    assert done.returncode == 0, done.stderr
    assert "RANK 0 fused True flag True" in done.stdout
    assert "RANK 1 fused True flag True" in done.stdout


@pytest.mark.slow
def test_accelerate_launch_as_a_module(script: list[str]) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    done = _run(*launch, *script, "--use_fast_kernels")
    assert done.returncode == 0, done.stderr
    assert "fused True flag True" in done.stdout


def test_exit_code_passes_through() -> None:
    assert _run(sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_signals_pass_through(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(300)"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-c", child],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_process_without_hugging_face_imports_nothing() -> None:
    script = (
        "import sys; heavy = {'slothplug', 'torch', 'transformers', 'pluggy'} & set(sys.modules); print(sorted(heavy))"
    )
    done = _run(sys.executable, "-c", script)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize("present", [True, False])
def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path, present: bool) -> None:
    if present:
        (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)\nvalue = 5\n")
    script = "import sys, sitecustomize; print(getattr(sitecustomize, 'value', None), len(sys.meta_path))"
    done = _run(sys.executable, "-c", script, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    assert done.returncode == 0, done.stderr
    assert ("mine sitecustomize" in done.stdout) == present
    assert done.stdout.splitlines()[-1].startswith("5 " if present else "None ")


def test_where_slothplug_is_not_installed_it_says_so(tmp_path: Path) -> None:
    # Stands for another interpreter: one whose transformers is there, and slothplug is not.
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text("class Trainer: pass\n")
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'slothplug':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import transformers.trainer\n"
    )
    done = _run(sys.executable, "-c", script)
    assert done.returncode == 1
    assert f"is not installed for {sys.executable}" in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["no-such-command"], 127, "no command 'no-such-command' was found."),
        (["train.py"], 127, "Did you mean: slothplug run python train.py"),
    ],
)
def test_a_command_that_cannot_start(command: list[str], code: int, said: str) -> None:
    done = _run(*command)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_script_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch(mode=0o644)
    done = _run(str(tmp_path / "train.py"))
    assert done.returncode == 126
    assert "Did you mean: slothplug run python" in done.stderr


HARD_CODED = """
import sys
import torch
from transformers import TrainingArguments
TrainingArguments(output_dir={output!r}, use_cpu=True, report_to=[]{more})
"""
UNREAD = "--use_fast_kernels is on the command line, but nothing in train.py read it"


@pytest.mark.parametrize(
    ("words", "more", "warned"),
    [
        (["--use_fast_kernels", "true"], "", True),
        (["--use-fast-kernels"], "", True),
        (["use_fast_kernels=true"], "", True),
        (["--use_fast_kernels", "false"], "", False),
        (["--use_fast_kernels=no"], "", False),
        (["use_fast_kernels"], "", False),
        ([], "", False),
        (["--use_fast_kernels", "true"], ", use_fast_kernels=True", False),
    ],
)
def test_a_flag_that_nothing_reads_is_said_at_exit(tmp_path: Path, words: list[str], more: str, warned: bool) -> None:
    (tmp_path / "train.py").write_text(HARD_CODED.format(output=str(tmp_path), more=more))
    done = _run(sys.executable, str(tmp_path / "train.py"), *words)
    assert done.returncode == 0, done.stderr
    assert (UNREAD in done.stderr) == warned
    assert ("Write use_fast_kernels=True into the script's call of TrainingArguments" in done.stderr) == warned


def test_only_one_process_says_that_nothing_read_the_flag(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = _run(*launch, str(tmp_path / "train.py"), "--use_fast_kernels", "true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(UNREAD) == 1
