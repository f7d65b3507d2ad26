"""The demo, whole, at the smallest size: two processes, two tables, one picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slothplug.cli import demo, demo_text
from slothplug.cli.demo_plan import CPU, GPU, choose_plan
from slothplug.errors import SlothplugError

TINY = replace(
    CPU,
    model={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 1, "max_position_embeddings": 32},
    model_vocab=320, tokenizer_vocab=320, rows=2, tokens=32, steps=3, rank=4,
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "choose_plan", lambda steps, cpu: TINY)
    monkeypatch.setattr(demo_text, "TRAINING_BYTES", 50_000)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")


def test_the_demo_trains_both_sides_and_compares_them(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("matplotlib")
    demo.run_demo(tmp_path)
    printed = capsys.readouterr().out
    stock, fast = (json.loads((tmp_path / f"{side}.json").read_text()) for side in ("stock", "fast"))

    assert len(stock["losses"]) == len(fast["losses"]) == TINY.steps
    assert stock["losses"][0] != stock["losses"][-1]
    assert max(abs(a - b) for a, b in zip(stock["losses"], fast["losses"], strict=True)) <= 1e-5
    fused = fast["report"]["operations"]
    assert fused["rms_norm"]["fused"] == fused["rms_norm"]["found"] == 3
    assert any(site["calls"]["served"] for site in fast["report"]["sites"])
    assert stock["peak_memory"] > 2**20

    gradients = {side: torch.load(tmp_path / f"{side}-gradients.pt")["gradients"][1] for side in ("stock", "fast")}
    assert all(gradient.any() for gradient in gradients["stock"].values())
    assert 0 <= demo.largest_difference(gradients["fast"], gradients["stock"]) <= 1e-5

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for words in ("rms_norm", "training loss", "peak process memory", "largest differences", "time is not the point"):
        assert words in printed


def test_a_run_that_fails_is_a_sentence_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(SlothplugError, match=r"stock run ended with status 1(.|\n)*plan\.json"):
        list(demo._worker(tmp_path, "stock"))


def test_a_gradient_on_one_side_only_is_an_error() -> None:
    with pytest.raises(SlothplugError, match="weight"):
        demo.largest_difference({}, {"weight": torch.ones(2)})


def test_the_difference_is_relative_to_the_tensor() -> None:
    stock = {"small": torch.full((4,), 1e-6), "large": torch.full((4,), 1e6)}
    fast = {"small": torch.full((4,), 1.1e-6), "large": torch.full((4,), 1e6)}
    assert demo.largest_difference(fast, stock) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [(120, GPU), (40, replace(GPU, rows=1)), (6, replace(CPU, device="cuda"))],
)
def test_the_plan_fits_the_gpu(monkeypatch: pytest.MonkeyPatch, free_gib: int, expected: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * 2**30, 0))
    assert choose_plan(None, cpu=False) == expected
    assert choose_plan(7, cpu=True) == replace(CPU, steps=7)


def test_the_text_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_text, "TRAINING_BYTES", 20_000)
    first, second = (demo_text.blocks_of_tokens(3, 16, 300) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (3, 16)
    assert first.max() < 300
