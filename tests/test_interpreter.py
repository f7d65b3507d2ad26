"""Only tests/kernels run interpreted kernels: elsewhere a CPU is served as a user's would be."""

from __future__ import annotations

import pytest
import torch

from slothplug.kernels.backend import choose_backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is interpreted")
def test_a_cpu_means_pytorch_also_in_a_worker_process() -> None:
    assert choose_backend(torch.device("cpu")) == "torch"
