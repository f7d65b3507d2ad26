"""The flag's schema: what is accepted, and what the refusals say."""

from __future__ import annotations

import pytest
import yaml

import slothplug
from slothplug import Settings, SettingsError


def test_true_false_mapping_and_settings_are_accepted() -> None:
    assert Settings.from_flag(True) == Settings()
    assert Settings.from_flag(False) is None
    assert Settings.from_flag({"strict": True}) == Settings(strict=True)
    assert Settings.from_flag(Settings(strict=True)).strict


@pytest.mark.parametrize("name", ["graphs", "checkpointing"])
def test_off_as_yaml_reads_it(name: str) -> None:
    flag = yaml.safe_load(f"{name}: off")
    assert flag == {name: False}
    assert getattr(Settings.from_flag(flag), name) == "off"
    with pytest.raises(SettingsError, match="input should be 'auto' or 'off'"):
        Settings.from_flag({name: True})


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ({"strcit": True}, ["use_fast_kernels.strcit", "Did you mean 'strict'?"]),
        ({"verfy": False}, ["Did you mean 'verify'?"]),
        ({"strict": "yes please"}, ["use_fast_kernels.strict", "'yes please'", "bool"]),
        ({"backend": "cuda"}, ["use_fast_kernels.backend", "'auto', 'triton' or 'torch'"]),
        ({"loss_chunk_mib": 0}, ["use_fast_kernels.loss_chunk_mib", "greater than or equal to 1"]),
        ({3: True}, ["names of settings are words"]),
        ("true", ["'true'", "true, false, or a mapping"]),
        (1, ["1 (int)", "true, false, or a mapping"]),
        (None, ["None", "true, false, or a mapping"]),
        ([True], ["list", "true, false, or a mapping"]),
    ],
)
def test_a_wrong_flag_is_refused_with_what_was_found_and_what_to_do(flag: object, words: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.from_flag(flag)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("setting", ["ops", "skip_ops"])
def test_an_unknown_operation_is_refused_with_the_nearest_one(setting: str, tiny_llama) -> None:
    with pytest.raises(SettingsError, match=r"'rmsnorm', which is no operation here\. Did you mean 'rms_norm'\?"):
        slothplug.patch(tiny_llama(), {setting: ["rmsnorm"]})


def test_every_setting_is_documented_where_it_is_declared() -> None:
    assert all(field.description for field in Settings.model_fields.values())
