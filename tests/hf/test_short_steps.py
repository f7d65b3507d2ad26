"""The benchmark of short steps, on a tiny model and a CPU."""

from __future__ import annotations

from pathlib import Path

from slothplug.bench.short_steps import measure, save_model, table


def test_stock_and_slothplug_beside_each_other(tmp_path: Path) -> None:
    save_model("tiny", str(tmp_path))
    rows = ["1x8", "8xlengths", "trainer", "trainer-unfiltered"]
    results = measure(str(tmp_path), ["stock", "slothplug"], "checkpointing", rows, 2)
    for stock, ours in zip(results[:4], results[4:], strict=True):
        assert stock["row"] == ours["row"]
        assert abs(stock["loss"] - ours["loss"]) < 0.05  # bfloat16
        assert all(second > 0 for second in ours["seconds"])
    lines = table(
        [*results, {"variant": "unsloth", "setting": "plain", "row": "1x8", "error": "not here"}]
    ).splitlines()
    assert len(lines) == 2 + 9
    assert all(" stock | 1.000 " in line for line in lines[2:6])
    assert "failed: not here" in lines[-1]
