"""The benchmark of a step runs `axolotl train` itself; here on a CPU and a model that is tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slothplug.bench.axolotl_step import LIGER, LORA_KERNELS, VARIANTS, configuration, prepare
from slothplug.bench.steps import Case
from tests.axolotl.runs import command, load


def test_stock_and_slothplug_are_timed_on_the_same_rows(tmp_path: Path) -> None:
    output = tmp_path / "step"
    given = "--shape tiny --batch 2 --length 64 --rank 4 --steps 2 --warmup 1 --checkpointing on"
    for variant in ("stock", "slothplug"):  # the second call adds to what the first wrote
        done = command(
            tmp_path, "python", "-m", "slothplug.bench.axolotl_step", *given.split(), "--variants", variant,
            "--folder", str(tmp_path / "files"), "--output", str(output),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    stock, fast = json.loads(output.with_suffix(".json").read_text())
    assert "error" not in stock, stock["error"]
    assert "error" not in fast, fast["error"]
    assert (stock["report"], fast["report"]["lora"]["fused"]) == (None, 14)
    for result in (stock, fast):
        assert len(result["seconds"]) == 2
        assert len(result["losses"]) == 3
        assert result["peak_bytes"] > 0
    assert fast["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    text = output.with_suffix(".md").read_text()
    assert "| tiny | 2 x 64 | lora r4 | on | slothplug | " in text
    for variant in ("stock", "slothplug"):
        assert f"    python -m slothplug.bench.axolotl_step {given} --variants {variant}\n" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_axolotl_accepts_every_configuration(tmp_path: Path, variant: str, adapter: str) -> None:
    case = Case("tiny", adapter, batch=2, length=64, checkpointing=False)
    prepare(case, 1, tmp_path)
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(configuration(case, variant, 1, tmp_path)))
    cfg = load(path)
    assert [cfg[key] for key in LORA_KERNELS] == [variant == "axolotl"] * 4
    assert [bool(cfg.get(key)) for key in LIGER] == [variant == "axolotl"] * 4
    assert bool(cfg.get("use_fast_kernels")) == (variant == "slothplug")
    assert cfg.load_in_4bit == (adapter == "qlora")
