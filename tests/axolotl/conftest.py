"""These tests need the real Axolotl in the interpreter that runs them; ``make test-axolotl`` sets one up."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALLED = importlib.util.find_spec("axolotl") is not None

if INSTALLED:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"  # without a network, sending telemetry never ends
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INSTALLED:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="Axolotl is not installed here; make test-axolotl installs it"))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and rows, in which configurations are written."""
    from tests.tiny_on_disk import write

    folder = tmp_path_factory.mktemp("axolotl")
    write(folder)
    return folder


@pytest.fixture(autouse=True)
def _graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are recorded on a CPU as well, by the double of the recorder, in runs of this process."""
    from slothplug.graphs import state
    from tests.graphs.replaying import RunsAgain

    monkeypatch.setattr(state, "make_recorder", RunsAgain)
