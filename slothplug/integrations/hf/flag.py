"""The flag as an argument of a training script: command line, YAML, JSON or Python, to one checked plain value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slothplug.errors import SettingsError
from slothplug.settings import FLAG, Settings

if TYPE_CHECKING:
    FlagArgument = bool | dict[str, Any] | str
else:
    # HfArgumentParser takes the second member of a union that ends in None: a string, which `flag_value` reads.
    FlagArgument = dict | str | None

METADATA = {
    "help": "Run the model on fused kernels: true, false, or a mapping of settings (on a command line as JSON).",
    "nargs": "?",
    "const": True,
}
"""``nargs`` and ``const`` reach argparse as they are: ``--use_fast_kernels`` alone means true."""

# The words that HfArgumentParser accepts for a boolean.
TRUE = ("yes", "true", "t", "y", "1")
FALSE = ("no", "false", "f", "n", "0")


def flag_value(value: object) -> bool | dict[str, Any]:
    """The flag's value as plain data that JSON can hold: ``True``, ``False``, or the mapping of settings.

    Args:
        value: a bool, a mapping of settings, ``Settings``, or a string that holds a boolean word or a JSON object.

    Raises:
        SettingsError: the value is none of these, or a setting in it is not valid.
    """
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, Settings):
        value = value.model_dump(exclude_unset=True)
    settings = Settings.from_flag(value)  # type: ignore[arg-type]  # refuses every other type itself
    if settings is None:
        return False
    # An empty mapping is the flag with every setting at its default; it must not read as false.
    return dict(value) if isinstance(value, Mapping) and value else True


def _from_text(text: str) -> object:
    word = text.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    if not word.startswith("{"):
        raise SettingsError(
            f"{FLAG} is {text!r}. Use true, false, or settings as a JSON object, such as "
            f"""'{{"strict": true, "skip_ops": ["rotary"]}}'."""
        )
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{FLAG} is {text!r}, which is no valid JSON: {error}.") from None
