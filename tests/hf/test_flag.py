"""The flag's value from a command line, a file or Python, and what a wrong one is told."""

from __future__ import annotations

import pytest

from slothplug import Settings, SettingsError
from slothplug.integrations.hf import FastKernelsCallback
from slothplug.integrations.hf.flag import flag_value


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("False", False),
        (" no ", False),
        ("1", True),
        ("{}", True),
        ({}, True),
        ({"strict": True}, {"strict": True}),
        ('{"skip_ops": ["rms_norm"], "backend": "torch"}', {"skip_ops": ["rms_norm"], "backend": "torch"}),
        (Settings(), True),
        (Settings(strict=True), {"strict": True}),
    ],
)
def test_becomes_plain_data(given: object, kept: object) -> None:
    assert flag_value(given) == kept


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ture", "Use true, false, or settings as a JSON object"),
        ('{"strict": true', "no valid JSON"),
        ('{"strikt": true}', "Did you mean 'strict'?"),
        ({"bakend": "torch"}, "Did you mean 'backend'?"),
        ({"backend": "cuda"}, "use_fast_kernels.backend is 'cuda'"),
        ({"strict": "yes"}, "use_fast_kernels.strict is 'yes'"),
        (1, "Use true, false, or a mapping"),
        (None, "Use true, false, or a mapping"),
        (["strict"], "Use true, false, or a mapping"),
    ],
)
def test_wrong_values_are_refused_with_advice(given: object, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        flag_value(given)
    assert said in str(caught.value)


def test_the_callback_refuses_when_it_is_built() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'verify'"):
        FastKernelsCallback({"verifi": False})
