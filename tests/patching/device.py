"""Where the models of these tests live: on the GPU of a machine that has one."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="of tensors on a CPU")
