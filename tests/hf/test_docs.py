"""The pages of the integrations tell the settings as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slothplug import Settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["huggingface", "axolotl", "llamafactory"])
def test_the_table_is_the_schema(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", text, re.MULTILINE)
    told = {name: (default, meaning) for name, default, meaning in rows}
    schema = {
        name: (repr(field.get_default(call_default_factory=True)), field.description)
        for name, field in Settings.model_fields.items()
    }
    assert told == schema
