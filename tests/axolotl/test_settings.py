"""The flag in Axolotl's schema, and the plugin's way into a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slothplug import Settings, SettingsError
from slothplug.integrations.axolotl import frontdoor
from slothplug.integrations.axolotl.kernels import LORA_KERNELS
from slothplug.integrations.axolotl.translation import READ_LOGITS, padding_key, settings_of
from slothplug.settings import FLAG
from tests.axolotl.runs import DPO, LORA, OURS, WITHOUT_KERNELS, load, write

EVERY_SETTING = {
    "ops": ["lora", "head", "glu"], "skip_ops": ["glu"], "backend": "torch", "strict": True, "verify": True,
    "lora_precision": "compute", "keep_logits": True, "loss_chunk_mib": 64,
    "checkpointing": "off", "graphs": "off", "graph_shapes": 4, "graph_after": 3, "graph_padding": False,
}  # fmt: skip


@pytest.fixture
def resolve(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(workplace)

    def resolve(**keys: Any) -> Any:
        return load(write(workplace, "settings", **{"plugins": [OURS]} | keys))

    return resolve


def test_every_setting_is_in_the_configuration_that_axolotl_keeps(resolve: Any) -> None:
    assert EVERY_SETTING.keys() == Settings.model_fields.keys()
    cfg = resolve(use_fast_kernels=EVERY_SETTING)
    assert cfg.to_dict()[FLAG] == EVERY_SETTING
    assert settings_of(cfg).settings == Settings(**EVERY_SETTING)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ({"strickt": True}, r"use_fast_kernels\.strickt is not a setting\. Did you mean 'strict'\?"),
        ({"loss_chunk_mib": 0}, r"use_fast_kernels\.loss_chunk_mib is 0: input should be greater"),
        ({"skip_ops": ["rmsnorm"]}, r"use_fast_kernels\.skip_ops names 'rmsnorm'.*Did you mean 'rms_norm'\?"),
        ({"ops": ["lora", "heads"]}, r"use_fast_kernels\.ops names 'heads'.*Did you mean 'head'\?"),
        (3, r"use_fast_kernels is 3 \(int\)\. Use true, false, or a mapping"),
    ],
)
def test_what_is_wrong_is_said_in_our_words(resolve: Any, flag: object, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        resolve(use_fast_kernels=flag)


@pytest.mark.parametrize("plugins", [[OURS], None], ids=["listed", "front door"])
def test_a_misspelt_flag_is_not_dropped(
    resolve: Any, plugins: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/transformers/issues/34016: a flag that did nothing, and no word of it."""
    from axolotl.cli import config

    monkeypatch.setattr(config, "prepare_plugins", config.prepare_plugins)
    if plugins is None:
        frontdoor.open_config(config.prepare_plugins)
    with pytest.raises(SettingsError, match=r"'use_fast_kernel' is no key.*Did you mean 'use_fast_kernels'\?"):
        resolve(plugins=plugins, use_fast_kernel=True)
    assert not resolve(plugins=plugins, use_kernels=False).get(FLAG)


def test_axolotls_schema_checks_it_too(resolve: Any) -> None:
    """Without ``register``: where a configuration is validated that was not read from a file."""
    from axolotl.utils.config import validate_config
    from pydantic import ValidationError

    cfg = resolve(use_fast_kernels=True)
    del cfg["batch_size"]  # resolved from what was written; Axolotl refuses both
    for wrong, right in (({"strickt": True}, "strict"), ({"skip_ops": ["rmsnorm"]}, "rms_norm")):
        cfg[FLAG] = wrong
        with pytest.raises(ValidationError, match=rf"Did you mean '{right}'\?"):
            validate_config(cfg)


@pytest.mark.parametrize(
    ("keys", "lines"),
    [({}, 1), ({FLAG: False}, 0), ({FLAG: True}, 0), ({"plugins": None}, 0)],
    ids=["listed", "switched off", "switched on", "not listed"],
)
def test_a_plugin_without_the_flag_says_so(
    resolve: Any, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], lines: int
) -> None:
    resolve(**keys)
    said = capsys.readouterr().out
    assert said.count("slothplug: nothing is patched") == lines
    assert said.count("write `use_fast_kernels: true` into it") == lines


LONE_KERNEL = dict.fromkeys(LORA_KERNELS) | {"lora_o_kernel": False}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (LORA, ", which it switches on by itself, are off: slothplug set lora_mlp_kernel, lora_qkv_kernel, "),
        (LORA | WITHOUT_KERNELS, " are off, as the configuration says (lora_mlp_kernel, lora_qkv_kernel, "),
        (LORA | LONE_KERNEL, " are off, as the configuration says (lora_o_kernel: false)"),
        ({}, None),
    ],
    ids=["nobody wrote", "written", "one written", "no adapters"],
)
def test_the_report_says_who_switched_axolotls_kernels_off(
    resolve: Any, keys: dict[str, Any], words: str | None
) -> None:
    cfg = resolve(use_fast_kernels=True, **keys)
    (callback,) = plugin().add_callbacks_pre_trainer(cfg, None)
    about = [note for note in callback.notes if "LoRA kernels" in note]
    assert len(about) == (words is not None)
    assert words is None or f"Axolotl's own LoRA kernels{words}" in about[0]


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        ({"attn_implementation": "eager"}, True),
        ({"attn_implementation": "sdpa"}, True),
        ({"attn_implementation": None}, False),
        ({"attn_implementation": "fp8"}, False),
        (DPO, False),
        ({"reward_model": True, "model_type": "AutoModelForSequenceClassification"}, False),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_packing_is_advised_where_axolotl_keeps_packed_samples_apart(
    resolve: Any, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], advised: bool
) -> None:
    cfg = resolve(use_fast_kernels=True, **keys)
    assert padding_key(cfg) == ("sample_packing: true" if advised else "")
    (callback,) = plugin().add_callbacks_pre_trainer(cfg, None)
    assert callback.padding_key == padding_key(cfg)


def test_packing_is_not_advised_where_axolotl_warns_of_losses_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = {"attn_decontaminates_packing": True, "attn_implementation": "sdpa", "bf16": True}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, advice in (((8, 0), ""), ((9, 0), "sample_packing: true")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda found=capability: found)
        assert padding_key(cfg) == advice


def plugin() -> Any:
    from axolotl.integrations.base import PluginManager

    return PluginManager.get_instance().plugins[OURS]


def test_registering_again_changes_nothing(resolve: Any) -> None:
    from axolotl.integrations.base import PluginManager

    cfg = resolve(use_fast_kernels={"strict": True}, **LORA)
    before = cfg.to_dict()
    for plugin in PluginManager.get_instance().plugins.values():
        plugin.register(cfg)
        plugin.register(cfg)
    assert cfg.to_dict() == before


@pytest.mark.parametrize("key", READ_LOGITS)
def test_objectives_that_read_logits_keep_them(key: str) -> None:
    assert settings_of({FLAG: True}).settings.keep_logits is False
    chosen = settings_of({FLAG: True, key: "dpo" if key == "rl" else True})
    assert chosen.settings.keep_logits
    assert f"because {key}: " in chosen.note
    assert settings_of({FLAG: {"keep_logits": True}, key: True}).note is None


def test_diffusion_keeps_logits() -> None:
    plugin = "axolotl.integrations.diffusion.DiffusionPlugin"
    assert settings_of({FLAG: True, "plugins": [OURS, plugin]}).settings.keep_logits


def test_a_missing_requirement_is_an_error_that_axolotl_does_not_swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.integrations.base import PluginManager

    monkeypatch.delitem(sys.modules, "slothplug.integrations.axolotl.plugin", raising=False)
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    with pytest.raises(RuntimeError, match="slothplug's Axolotl plugin cannot be loaded"):
        PluginManager.get_instance().register(OURS)


def test_the_front_door_lists_the_plugin_once(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from axolotl.cli import config

    monkeypatch.setattr(config, "prepare_plugins", config.prepare_plugins)
    assert resolve(plugins=None, use_fast_kernels=True).get(FLAG) is None
    frontdoor.open_config(config.prepare_plugins)
    wrapped = config.prepare_plugins
    frontdoor.open_config(wrapped)
    assert config.prepare_plugins is wrapped
    assert resolve(plugins=None, use_fast_kernels=True).plugins == [OURS]
    assert resolve(use_fast_kernels=True).plugins == [OURS]
    assert not resolve(plugins=None).get("plugins")
