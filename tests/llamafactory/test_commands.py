"""The commands as a user types them, each in a process of its own, beside a stock run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import Environment
from tests.llamafactory.runs import LORA, STAGES, Run, assert_equal, command, read, write

RUN = ["python", "-m", "slothplug.cli.main", "run"]
OURS = ["python", "-m", "slothplug.integrations.llamafactory"]
KEYS = STAGES["sft"] | LORA
FUSED = "slothplug: rms_norm 5/5 (torch); glu 2/2 (torch); rotary 2/2 (torch); head 1/1 (torch); lora 14/14 (torch)"


@pytest.fixture(scope="module")
def stock(workplace: Path) -> Run:
    done = command(workplace, "llamafactory-cli", "train", write(workplace, "stock", **KEYS).name)
    assert done.returncode == 0, done.stderr
    assert "slothplug" not in done.stdout + done.stderr
    return read(workplace / "stock")


def test_slothplug_run(workplace: Path, stock: Run) -> None:
    path = write(workplace, "launched", **KEYS, use_fast_kernels={"strict": True})
    done = command(workplace, *RUN, "llamafactory-cli", "train", path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f">> {FUSED}" in done.stdout
    assert "neat_packing: true would remove it" in done.stdout
    assert_equal(read(workplace / "launched"), stock)


def test_slothplug_run_with_use_unsloth(workplace: Path, stock: Run) -> None:
    done = command(
        workplace, *RUN, "llamafactory-cli", "train", write(workplace, "booster", **KEYS).name, "use_unsloth=true"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f">> {FUSED}" in done.stdout
    assert "`use_unsloth: true` is served by slothplug, since Unsloth is not installed" in done.stdout
    assert_equal(read(workplace / "booster"), stock)


def test_slothplug_llamafactory(workplace: Path, stock: Run) -> None:
    done = command(workplace, *OURS, "train", write(workplace, "ours", **KEYS, use_fast_kernels=True).name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f">> {FUSED}" in done.stdout
    assert_equal(read(workplace / "ours"), stock)


def test_autoload(workplace: Path, stock: Run, tmp_path: Path) -> None:
    """The command untouched."""
    environment = Environment(tmp_path)
    environment.install()
    environment.run("python", "-m", "slothplug.cli.main", "autoload", "on")
    path = write(workplace, "untouched", **KEYS, use_unsloth=True)
    done = environment.run("python", "-m", "llamafactory.cli", "train", path.name, cwd=workplace)
    assert f">> {FUSED}" in done.stdout
    assert_equal(read(workplace / "untouched"), stock)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        [*RUN, "torchrun", "--nproc_per_node", "2", "--master_port", "29631", "train.py"],
        ["torchrun", "--nproc_per_node", "2", "--master_port", "29632", "-m", *OURS[2:], "train"],
        [*RUN, "accelerate", "launch", "--cpu", "--num_processes", "1", "train.py"],
        ["accelerate", "launch", "--cpu", "--num_processes", "1", "-m", *OURS[2:], "train"],
    ],
    ids=["run torchrun", "torchrun -m", "run accelerate", "accelerate -m"],
)
def test_other_launchers(workplace: Path, launch: list[str]) -> None:
    # As the script src/train.py of LLaMA-Factory's repository, which its package does not hold.
    (workplace / "train.py").write_text("from llamafactory.train.tuner import run_exp\n\nrun_exp()\n")
    path = write(workplace, "other", **KEYS, use_fast_kernels={"strict": True})
    done = command(workplace, *launch, path.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(FUSED) == 1, done.stdout


@pytest.mark.slow
def test_an_adapter_of_a_served_run_is_exported(workplace: Path, stock: Run) -> None:
    """With ``use_unsloth: true`` left in the file, as the web UI and users leave it."""
    exported = {"model_name_or_path": "model", "template": "default", "finetuning_type": "lora", "use_unsloth": True}
    words = [f"--{key}={value}" for key, value in exported.items()]
    words += [f"--adapter_name_or_path={stock.folder}", f"--export_dir={workplace / 'exported'}"]
    done = command(workplace, *RUN, "llamafactory-cli", "export", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slothplug serves training only" in done.stdout
    assert (workplace / "exported" / "model.safetensors").exists()


@pytest.mark.slow
def test_what_is_wrong_ends_the_command(workplace: Path) -> None:
    for keys, said in (
        (
            {"use_fast_kernels": True, "use_unsloth_gc": True},
            "`use_unsloth_gc: true` conflicts with `use_fast_kernels`",
        ),
        ({"use_fast_kernels": {"strickt": True}}, "Did you mean 'strict'?"),
        ({"use_fast_kernel": True}, "Some keys are not used by the HfArgumentParser: ['use_fast_kernel']"),
    ):
        path = write(workplace, "wrong", **KEYS, **keys)
        for launcher in ([*RUN, "llamafactory-cli"], OURS):
            done = command(workplace, *launcher, "train", path.name)
            assert done.returncode != 0
            assert said in done.stderr.splitlines()[-1], done.stderr
