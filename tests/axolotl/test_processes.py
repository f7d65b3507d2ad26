"""Several processes, which train one model together."""

from __future__ import annotations

from pathlib import Path

from tests.axolotl.runs import OURS, RECORDER, command, read, write
from tests.axolotl.test_training import ADAPTERS, assert_equal


def test_two_processes(workplace: Path) -> None:
    keys = ADAPTERS | {"ddp_find_unused_parameters": False, "gradient_accumulation_steps": 1}
    runs = []
    for name, flag in (("two-on", True), ("two-off", None)):
        path = write(workplace, name, plugins=[RECORDER, OURS], use_fast_kernels=flag, **keys)
        launch = ["--launcher", "torchrun", "--", "--nproc_per_node", "2", "--master_port", "29533"]
        done = command(workplace, "axolotl", "train", path.name, *launch)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(read(workplace / name))
    on, off = runs
    assert_equal(on, off)
    assert read(workplace / "two-on", rank=1).operations == on.operations
