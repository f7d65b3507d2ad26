"""The table of known failures is what the tests say."""

from __future__ import annotations

from tests import known_failures


def test_the_table_is_current() -> None:
    assert known_failures.README.read_text(encoding="utf-8") == known_failures.text(), (
        "run: python -m tests.known_failures"
    )
