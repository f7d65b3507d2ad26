"""Every test starts and ends with transformers as it was installed and the package's logger as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import transformers

from slothplug.integrations.hf import frontdoor


def pytest_itemcollected(item: pytest.Item) -> None:
    """The integration must work on every supported set of versions; the launcher but once."""
    launcher = item.path.name == "test_run.py" and item.name != "test_python_script"
    if not launcher and not item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.core)


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _as_installed() -> Iterator[None]:
    logger = logging.getLogger("slothplug")
    level, handlers = logger.level, list(logger.handlers)
    yield
    frontdoor.uninstall()
    logger.setLevel(level)
    logger.handlers[:] = handlers
