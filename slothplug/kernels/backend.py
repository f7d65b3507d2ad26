"""The backend of a device: ``triton`` on a GPU that Triton supports, ``torch`` everywhere else.

``TRITON_INTERPRET=1``, set before the first import of a kernel, lets the Triton kernels run on any CPU; tests use it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any, Literal, TypeVar

import torch

Backend = Literal["triton", "torch"]

# Volta and older: Triton 3 no longer generates code for them.
MINIMUM_CUDA_CAPABILITY = (7, 5)


@functools.cache
def triton_importable() -> bool:
    """True where ``import triton`` would find the package. Does not import it: that may ask for a driver."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None, which disables the import
        return False


def interpreting() -> bool:
    """True where Triton interprets its kernels, so that they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot serve ``device``, for the report; None where it can."""
    if not triton_importable():
        return "Triton is not installed (pip install triton; Linux only)"
    if device.type == "cpu":
        return None if interpreting() else "the model is on a CPU"
    if device.type != "cuda":
        return f"Triton kernels are not tested on device type '{device.type}'"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < MINIMUM_CUDA_CAPABILITY:
            found, needed = (".".join(map(str, c)) for c in (capability, MINIMUM_CUDA_CAPABILITY))
            return f"{torch.cuda.get_device_name(device)} has compute capability {found}, Triton needs {needed}"
    return None


def choose_backend(device: torch.device) -> Backend:
    """The backend that ``backend: auto`` chooses on ``device``."""
    return "torch" if why_not_triton(device) else "triton"


Implementation = TypeVar("Implementation")


def primitives_on(backend: Backend, torch_primitives: Implementation, triton_module: str) -> Implementation:
    """The primitives of an operation on ``backend``: ``torch_primitives``, or the Triton class of the same functions.

    That is ``TritonPrimitives`` of ``kernels/triton/<triton_module>.py``, which is imported at its first use.

    Raises:
        ValueError: an unknown backend.
        ImportError: the module cannot be imported.
    """
    if backend == "torch":
        return torch_primitives
    if backend == "triton":
        on_triton: Implementation = _triton_primitives(triton_module)
        return on_triton
    raise ValueError(f"backend is 'torch' or 'triton', not {backend!r}")


@functools.cache
def _triton_primitives(module: str) -> Any:
    return importlib.import_module(f"slothplug.kernels.triton.{module}").TritonPrimitives
