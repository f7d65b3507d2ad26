"""What holds for every test: one thread a process, and a CPU that is served as a user's would be."""

from __future__ import annotations

import os

import pytest
import torch

# Read before tests/kernels sets it for its own tests.
_ASKED_TO_INTERPRET = "TRITON_INTERPRET" in os.environ

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _interpreter_in_kernel_tests_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere ``backend: auto`` on a CPU means PyTorch, whichever tests share the process."""
    in_kernel_tests = request.config.rootpath / "tests" / "kernels" in request.path.parents
    if not in_kernel_tests and not _ASKED_TO_INTERPRET:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
