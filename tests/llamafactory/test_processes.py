"""Several processes, which train one model together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.llamafactory.runs import Run, assert_equal, command, read, write
from tests.llamafactory.test_commands import FUSED, KEYS, OURS, RUN

TWO = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}


@pytest.fixture(scope="module")
def stock(workplace: Path) -> Run:
    done = command(workplace, "llamafactory-cli", "train", write(workplace, "two-stock", **KEYS).name, **TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world size: 2" in done.stdout
    return read(workplace / "two-stock")


@pytest.mark.parametrize(
    "launcher", [[*RUN, "llamafactory-cli"], OURS], ids=["slothplug run", "slothplug-llamafactory"]
)
def test_two_processes(workplace: Path, stock: Run, launcher: list[str]) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/6940: ``use_unsloth: true`` served one process only."""
    name = f"two-{len(launcher)}"
    path = write(workplace, name, **KEYS, use_unsloth=True, use_fast_kernels={"strict": True})
    done = command(workplace, *launcher, "train", path.name, **TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world size: 2" in done.stdout
    assert done.stdout.count(FUSED) == 1, done.stdout
    assert_equal(read(workplace / name), stock)
