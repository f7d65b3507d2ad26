"""A spread of the architecture table: 25 types that differ most, with PyTorch's kernels, and some with Triton's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.architectures import graphs
from tests.architectures.one import survey
from tests.architectures.processes import rows
from tests.architectures.table import OPS, served, shares

pytestmark = pytest.mark.slow

ALL = "head rms_norm rotary glu lora siblings"

SERVED = {
    "llama": ALL,
    "qwen3": ALL,  # norms of q and k
    "gemma2": ALL,  # 1 + w, softcapped logits
    "gemma4_text": ALL,  # a rotary function of one tensor, weightless norms
    "olmo2": ALL,
    "glm": "head rms_norm rotary glu lora siblings",  # packed gate and up, interleaved partial rotation
    "phi3": "head rms_norm rotary glu lora",  # q, k and v in one layer
    "cohere2": "head rotary glu lora siblings",  # layer norms, layers without positions
    "stablelm": "head rotary glu lora siblings",
    "gpt_neox": "head rotary lora",  # plain MLP
    "deepseek_v3": "head rms_norm rotary glu lora",  # latent attention, experts
    "mixtral": "head rms_norm rotary lora siblings",  # experts only
    "gpt_oss": "head rms_norm rotary lora siblings",
    "seed_oss": "head rms_norm rotary lora siblings",  # dropout after down
    "llama4_text": "head rms_norm glu lora siblings",  # rotates by complex numbers
    "granite": ALL,
    "granitemoehybrid": "head rms_norm glu lora",  # gated norms
    "falcon_h1": ALL,  # Mamba beside attention
    "recurrent_gemma": ALL,
    "mamba": "head rms_norm lora",
    "gpt2": "head",  # Conv1D everywhere
    "opt": "head lora siblings",
    "bloom": "head lora",
    "bart": "head lora siblings",
    "starcoder2": "head rotary lora siblings",
}
"""Types, and the operations of which every site is served in each."""

NOT_RECORDED = {
    "gemma4_text": "KVSharingDict",  # layers share keys and values through a dictionary that they change
    "gpt2": "",  # no layer has a served part
    "recurrent_gemma": "sets attributes",  # its state between calls
}
"""Types of which no layer is recorded, and a word of the reason."""

INTERPRETED = ("llama", "gemma2", "glm")


def counted(row: dict[str, Any]) -> str:
    """The operations for which a row counts, in words."""
    ops = [op for op in OPS if served(row, op)]
    return " ".join([*ops, "siblings"] if shares(row) else ops)


def equal(row: dict[str, Any]) -> bool:
    """Whether both compared steps are stock's."""
    return bool(row["plain"]["equal"] and row["lora"].get("equal", "not_run" in row["lora"]))


@pytest.mark.parametrize("model_type", SERVED)
def test_torch_kernels(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    (row,) = rows([model_type], 1, partial(survey, backend="torch"))
    assert equal(row), row
    assert counted(row) == SERVED[model_type], row


@pytest.mark.parametrize("model_type", SERVED)
def test_recorded_layers(model_type: str) -> None:
    """With graphs, by the double of the recorder, a step has the bits of the patched step without."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    (row,) = rows([model_type], 1, graphs.survey)
    if "not_run" in row:
        pytest.skip(row["not_run"])
    assert row["equal"], row
    if model_type in NOT_RECORDED:
        assert row["recorded"] == 0
        assert NOT_RECORDED[model_type] in str(row["reasons"])
    else:
        assert row["recorded"] == row["layers"] > 0, row


def test_interpreted_triton_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.architectures.survey", *INTERPRETED, "--backend", "triton"]
    subprocess.run(
        [*command, "--output", str(tmp_path / "rows")], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True
    )
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row["type"] for row in found] == list(INTERPRETED)
    for row in found:
        assert equal(row), row
        assert counted(row) == SERVED[row["type"]], row
