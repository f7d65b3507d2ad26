"""The same YAML with the flag off and on: equal losses, gradient norms, evaluations and saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.axolotl.runs import DPO, LORA, WITHOUT_KERNELS, Run, train
from tests.equal_runs import assert_equal_runs

ADAPTERS = LORA | WITHOUT_KERNELS
LONG = {"max_steps": 20, "val_set_size": 8, "eval_steps": 10}
# Bit-equal they are not: a fused operation adds up in another order, and where a gradient is next to zero Adam divides
# that rounding by its own size, into a part of a step of 3e-3. Seen: up to 1.4e-6, and 5.6e-6 where DPO trains all.
WEIGHTS = 5e-6
WEIGHTS_OF_DPO = 1e-5


def pair(workplace: Path, name: str, **keys: Any) -> tuple[Run, Run]:
    """Flag on first: what it left behind in the process would show in the run after it."""
    on = train(workplace, f"{name}-on", flag=True, **keys)
    off = train(workplace, f"{name}-off", **keys)
    return on, off


def assert_equal(on: Run, off: Run, *logged: str, weights: float = WEIGHTS) -> None:
    assert_equal_runs(on, off, logged, weights)
    assert (off.record["patched"], off.record["report"]) == (0, None)
    assert (on.record["callbacks"], off.record["callbacks"]) == (1, 0)


def fused(run: Run) -> dict[str, int]:
    return {op: counts["fused"] for op, counts in run.operations.items() if counts["fused"]}


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_twenty_steps_with_accumulation_and_evaluation(workplace: Path, adapter: str) -> None:
    on, off = pair(workplace, adapter, **LONG, **(ADAPTERS if adapter == "lora" else {}))
    assert_equal(on, off, "eval_loss")
    assert len(on.logged("loss")) == 20
    assert len(on.logged("eval_loss")) >= 2
    expected = {"rms_norm": 5, "glu": 2, "rotary": 2, "head": 1}
    assert fused(on) == (expected | {"lora": 14} if adapter == "lora" else expected)
    assert not [site for site in on.record["report"]["sites"] if site["calls"]["fallbacks"]]


VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing-and-dropout": ADAPTERS | {"gradient_checkpointing": True, "lora_dropout": 0.1},
    "checkpointing-not-reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "offloaded-inputs": ADAPTERS | {"gradient_checkpointing": True, "activation_offloading": "hidden_states"},
    "packing": ADAPTERS | {"sample_packing": True, "attn_implementation": "sdpa", "pad_to_sequence_len": True},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(workplace: Path, variant: str) -> None:
    on, off = pair(workplace, variant, **VARIANTS[variant])
    assert_equal(on, off)
    assert {"rms_norm", "glu", "rotary", "head"} <= fused(on).keys()
    if variant == "packing":
        notes = on.record["report"]["notes"]
        assert any("graphs: 2 layers recorded for 1 shape," in note for note in notes), notes


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_dpo_policy_and_reference(workplace: Path, adapter: str) -> None:
    on, off = pair(workplace, f"dpo-{adapter}", **DPO, **(LORA if adapter == "lora" else {}))
    assert_equal(on, off, "rewards/margins", weights=WEIGHTS_OF_DPO)
    assert "head" not in fused(on)
    assert fused(on).get("lora", 0) == (14 if adapter == "lora" else 0)
    assert any("because rl: dpo reads them" in note for note in on.record["report"]["notes"])
    if adapter == "full":
        assert on.record["reference"] > 0
        assert off.record["reference"] == 0
