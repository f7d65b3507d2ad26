"""docs/huggingface.md tells the settings as they are."""

from __future__ import annotations

import re
from pathlib import Path

from slothplug import Settings

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_the_table_is_the_schema() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: (default, text) for name, default, text in rows}
    schema = {
        name: (repr(field.get_default(call_default_factory=True)), field.description)
        for name, field in Settings.model_fields.items()
    }
    assert told == schema
