"""These tests need the real LLaMA-Factory in the interpreter that runs them, and are not collected by any other.

``make test-llamafactory`` sets one up.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("llamafactory") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and data sets, in which runs are configured."""
    from tests.llamafactory.runs import prepare

    folder = tmp_path_factory.mktemp("llamafactory")
    prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def _graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are recorded on a CPU as well, by the double of the recorder, in runs of this process."""
    from slothplug.graphs import state
    from tests.graphs.replaying import RunsAgain

    monkeypatch.setattr(state, "make_recorder", RunsAgain)
