"""The two backends that every operation is tested on, and the dtypes that each gets right on this machine."""

from __future__ import annotations

import pytest
import torch

from slothplug.kernels.backend import Backend, why_not_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one; otherwise the CPU, where Triton interprets its kernels."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    reason = why_not_triton(device) if request.param == "triton" else None
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype).split(".")[1])
def dtype(request: pytest.FixtureRequest, backend: Backend, device: torch.device) -> torch.dtype:
    if (request.param, backend, device.type) == (torch.bfloat16, "triton", "cpu"):
        pytest.skip("Triton's interpreter truncates where a GPU rounds to bfloat16")
    return request.param
