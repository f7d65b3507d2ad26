"""These tests need the real LLaMA-Factory in the interpreter that runs them; ``make test-llamafactory`` sets one up."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("llamafactory") is not None

if INSTALLED:
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INSTALLED:
        reason = "LLaMA-Factory is not installed here; make test-llamafactory installs it"
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and data sets, in which runs are configured."""
    from tests.llamafactory.runs import prepare

    folder = tmp_path_factory.mktemp("llamafactory")
    prepare(folder)
    return folder
