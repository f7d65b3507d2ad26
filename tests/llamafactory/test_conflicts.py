"""What asks for the same work as slothplug is refused before a model is loaded; what can live beside it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slothplug import ConflictError
from slothplug.integrations.llamafactory import run_exp
from slothplug.integrations.llamafactory.translation import training_of
from tests.llamafactory.runs import LORA, STAGES, configuration

LIGER = ["rms_norm", "rotary", "glu", "head"]


def refused(workplace: Path, said: str, **keys: Any) -> None:
    """The run is refused in these words; had it come to load the model, it would have found none."""
    keys = STAGES["sft"] | LORA | {"model_name_or_path": "no-such-model"} | keys
    with pytest.raises(ConflictError, match=said):
        run_exp(configuration(workplace, "conflict", **keys))


@pytest.mark.parametrize("flag", ["use_fast_kernels", "use_unsloth"])
@pytest.mark.parametrize("key", ["enable_liger_kernel", "use_liger_kernel"])
def test_liger(workplace: Path, key: str, flag: str) -> None:
    said = rf"`{key}: true` conflicts with `{flag}`: .*Delete the line `{key}: true`.*skip_ops: \[rms_norm, rotary, glu"
    refused(workplace, said, **{key: True, flag: True})
    assert training_of({key: True, "use_fast_kernels": {"skip_ops": LIGER}}) is not None
    assert training_of({key: False, "use_fast_kernels": True}) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_unsloth_gc", True), ("use_v1_kernels", True), ("use_v1_kernels", "npu_fused_rmsnorm"), ("use_kt", True)],
)
def test_llamafactorys_own(workplace: Path, key: str, value: object) -> None:
    line = f"`{key}: {str(value).lower()}`"
    refused(workplace, rf"{line} conflicts with `use_fast_kernels`: it .*Delete the line {line}\.", **{
        key: value, "use_fast_kernels": True,
    })  # fmt: skip


def test_all_that_conflict_are_named_at_once(workplace: Path) -> None:
    said = r"`enable_liger_kernel: true` conflicts.*`use_unsloth_gc: true` conflicts"
    refused(workplace, said, enable_liger_kernel=True, use_unsloth_gc=True, use_fast_kernels=True)


def test_on_a_command_line(workplace: Path) -> None:
    with pytest.raises(ConflictError, match=r"`use_unsloth_gc: true` conflicts"):
        run_exp(["--use_fast_kernels", "--use_unsloth_gc", "true", "--model_name_or_path", "no-such-model"])
    assert training_of(["--use_fast_kernels", "--use_unsloth_gc", "false"]) is not None


@pytest.mark.parametrize("args", [{}, {"use_fast_kernels": False}])
def test_without_the_flag_nothing_is_refused(args: dict[str, Any]) -> None:
    assert training_of(args | {"enable_liger_kernel": True, "use_unsloth_gc": True}) is None
