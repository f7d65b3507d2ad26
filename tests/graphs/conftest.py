"""Without a GPU, a double of the recorder runs what was recorded again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slothplug.graphs import state
from tests.graphs.replaying import RunsAgain
from tests.patching.conftest import on_device
from tests.patching.device import DEVICE


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        monkeypatch.setattr(state, "make_recorder", RunsAgain)
    with on_device():
        yield
