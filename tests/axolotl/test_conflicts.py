"""What asks for the same work as slothplug is refused before a model is loaded; what can live beside it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slothplug import ConflictError
from slothplug.integrations.axolotl.kernels import LORA_KERNELS
from tests.axolotl.runs import LORA, OURS, WITHOUT_KERNELS, load, write

LIGER = "axolotl.integrations.liger.LigerPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def resolve(workplace: Path, monkeypatch: pytest.MonkeyPatch, flag: object = True, first: str = "", **keys: Any) -> Any:
    """The validated configuration of this flag and these keys; ``first`` is a plugin to list before ours."""
    monkeypatch.chdir(workplace)
    plugins = [plugin for plugin in (first, OURS) if plugin]
    return load(write(workplace, "conflict", **{"plugins": plugins, "use_fast_kernels": flag} | keys))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("key", "op"),
    [
        ("liger_rope", "rotary"),
        ("liger_rms_norm", "rms_norm"),
        ("liger_glu_activation", "glu"),
        ("liger_cross_entropy", "head"),
        ("liger_fused_linear_cross_entropy", "head"),
    ],
)
def test_ligers_operations(workplace: Path, monkeypatch: pytest.MonkeyPatch, key: str, op: str, order: str) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2864: which replacement won depended on the order."""
    plugins = [LIGER, OURS] if order == "before" else [OURS, LIGER]
    words = rf"`{key}: true` conflicts with `use_fast_kernels`.*Delete the line `{key}: true`.*skip_ops: \[{op}\]"
    with pytest.raises(ConflictError, match=words):
        resolve(workplace, monkeypatch, plugins=plugins, **{key: True})
    kept = resolve(workplace, monkeypatch, {"skip_ops": [op]}, plugins=plugins, **{key: True})
    assert kept[key] is True


@pytest.mark.parametrize(
    "keys",
    [
        *({kernel: True} for kernel in LORA_KERNELS),
        {"cut_cross_entropy": True},
        {"chunked_cross_entropy": True},
        {"tiled_mlp": True},
        {"fused_attn_kernel": True},
        {"use_kernels": True},
        {"flash_attn_fuse_mlp": True},
        {"flash_attn_cross_entropy": True},
        {"activation_offloading": True, "gradient_checkpointing": True},
        {"activation_offloading": "legacy", "gradient_checkpointing": True},
        {"activation_offloading": "disk", "gradient_checkpointing": True},
        {"gradient_checkpointing": "offload"},
    ],
    ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()),
)
def test_axolotls_own(workplace: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2864"""
    key, value = next(iter(keys.items()))
    line = f"`{key}: {str(value).lower()}`"
    with pytest.raises(ConflictError, match=rf"{line} conflicts with `use_fast_kernels`.*Delete the line {line}"):
        resolve(workplace, monkeypatch, **LORA, **keys)


def test_all_that_conflict_are_named_at_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConflictError, match=r"`lora_mlp_kernel: true` conflicts.*`chunked_cross_entropy: true` conflicts"
    ):
        resolve(workplace, monkeypatch, lora_mlp_kernel=True, chunked_cross_entropy=True)


def test_a_conflict_that_is_a_plugins_default(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConflictError, match=rf"Delete the line `- {CUT}` under plugins, which switches it on"):
        resolve(workplace, monkeypatch, first=CUT)
    assert resolve(workplace, monkeypatch, first=CUT, cut_cross_entropy=False).use_fast_kernels is True
    assert resolve(workplace, monkeypatch, {"skip_ops": ["head"]}, first=CUT).cut_cross_entropy is True


@pytest.mark.parametrize("flag", [None, False])
def test_without_the_flag_axolotl_does_as_it_always_does(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, flag: bool | None
) -> None:
    cfg = resolve(workplace, monkeypatch, flag, first=LIGER, **LORA, liger_rms_norm=True)
    assert cfg.liger_rms_norm is True
    assert [cfg[key] for key in LORA_KERNELS] == [True] * 4


def test_ligers_plugin_that_does_nothing_may_stay(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(workplace, monkeypatch, first=LIGER).use_fast_kernels is True
    assert resolve(workplace, monkeypatch, first=LIGER, liger_layer_norm=True).liger_layer_norm is True


def test_axolotls_automatic_kernels_are_switched_off(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve(workplace, monkeypatch, **LORA)[key] for key in LORA_KERNELS] == [False] * 4
    chosen = resolve(workplace, monkeypatch, **LORA, lora_qkv_kernel=False)
    assert [chosen[key] for key in LORA_KERNELS] == [None, False, None, None]
    assert resolve(workplace, monkeypatch, **LORA, **WITHOUT_KERNELS).use_fast_kernels is True
