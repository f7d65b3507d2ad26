"""The two backends that every operation is tested on."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

from slothplug.kernels.backend import Backend, why_not_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; otherwise the CPU, where Triton interprets its kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    reason = why_not_triton(device) if request.param == "triton" else None
    if reason:
        pytest.skip(reason)
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
