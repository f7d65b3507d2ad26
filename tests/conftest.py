"""What holds for every test: one thread a process, and a CPU that is served as a user's would be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

KERNEL_TESTS = Path(__file__).parent / "kernels"
INTERPRETS = not torch.cuda.is_available()

torch.set_num_threads(1)
if INTERPRETS:
    # Triton reads it wherever a function is decorated; for its own library, which kernels call, that is here.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Outside tests/kernels ``backend: auto`` on a CPU means PyTorch, whichever tests share the process."""
    if INTERPRETS:
        if item.path.is_relative_to(KERNEL_TESTS):
            os.environ["TRITON_INTERPRET"] = "1"
        else:
            os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def _no_mixed_precision_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4 tells accelerate by an environment variable, which outlives the trainer that was built."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture(autouse=True)
def _precision_stays() -> Iterator[None]:
    """Whoever lets float32 products be rounded (TF32) and leaves it so changes the numbers of every later test."""
    before = _precision()
    yield
    after = _precision()
    if after != before:
        torch.set_float32_matmul_precision("highest")
    assert after == before


def _precision() -> str:
    """What products of float32 are computed in."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.allow_tf32 else "float32"
    return {"ieee": "float32", "none": "float32"}.get(matmul.fp32_precision, matmul.fp32_precision)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
