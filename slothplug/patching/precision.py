"""Modes in which probes run: fixed seeds, no autocast, no TF32. The user's modes are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Seeds the generators for a probe, and restores the state of the CPU's and of every GPU's generator afterwards."""
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        seed_generators(0)
        yield


@contextmanager
def full_float32_products() -> Iterator[None]:
    """Disables TF32, and bfloat16 on CPUs, for float32 products: with them two ways to one result differ by 1e-3.

    Trainers allow it for a whole run (Axolotl wherever the GPU has it, transformers with ``tf32=True``).

    torch has an older switch, ``set_float32_matmul_precision``, and from 2.9 on a hierarchy of ``fp32_precision``: a
    switch that was never set inherits, and must go on inheriting afterwards. What a switch reads does not tell whether
    it inherits. So the hierarchy is set from the top, and only a switch that still allows less is set itself.
    """
    backends: Any = torch.backends
    with ExitStack() as restore:
        precision = _float32_matmul_precision()
        if not hasattr(backends, "fp32_precision"):
            restore.callback(torch.set_float32_matmul_precision, str(precision))
            torch.set_float32_matmul_precision("highest")
        elif precision not in (None, "highest"):
            # Only the older switches keep the two ways of asking in agreement; torch refuses to multiply without.
            products = (backends.cuda.matmul, backends.mkldnn.matmul)
            restore.callback(_restore_older, str(precision), {one: one.fp32_precision for one in products})
            backends.cuda.matmul.allow_tf32 = False
        for switch in _hierarchy():
            if switch.fp32_precision not in _FULL:
                restore.callback(setattr, switch, "fp32_precision", switch.fp32_precision)
                switch.fp32_precision = "ieee"
        yield


_FULL = ("ieee", "none")
"""Values of a switch with which float32 is multiplied as float32; "none" is a library's own choice."""


class _OneDnn:
    """oneDNN's switch between that of all libraries and those of its operations.

    The setter of ``torch.backends.mkldnn.fp32_precision`` sets the one of all libraries (torch 2.13).
    """

    @property
    def fp32_precision(self) -> str:
        return str(torch.backends.mkldnn.fp32_precision)

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.backends.mkldnn.set_flags(_fp32_precision=value)


def _hierarchy() -> tuple[Any, ...]:
    """The switches that products of float32 depend on, each after those that it inherits from; none in older torch."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return ()
    # cudnn's is the one of all of CUDA's libraries.
    return backends, backends.cudnn, _OneDnn(), backends.cuda.matmul, backends.mkldnn.matmul


def float32_switches() -> tuple[str | None, ...]:
    """What the process has set for products and convolutions of float32, to be compared with what it had set before."""
    cudnn: Any = torch.backends.cudnn
    hierarchy = _hierarchy()
    if not hierarchy:
        return _float32_matmul_precision(), str(cudnn.allow_tf32)
    return tuple(switch.fp32_precision for switch in (*hierarchy, cudnn.conv))


def _float32_matmul_precision() -> str | None:
    """None where the newer switches were used, which torch does not let one mix with this."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def _restore_older(precision: str, products: dict[Any, str]) -> None:
    """Sets the older switch, and those of the libraries' products, which it sets as well, to what they were."""
    if precision == "high":
        torch.backends.cuda.matmul.allow_tf32 = True  # which leaves oneDNN's switch alone
    else:
        torch.set_float32_matmul_precision(precision)
    for switch, value in products.items():
        if switch.fp32_precision != value:
            switch.fp32_precision = value


def seed_generators(seed: int) -> None:
    """Seeds the CPU, and every GPU that is in use.

    ``torch.manual_seed`` would also queue a seed for the GPUs until CUDA starts, which replaces the user's own.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def stock_modes(device: torch.device) -> Iterator[None]:
    """Modes in which probes run, independent of the caller's: gradients, no inference mode, no autocast, no TF32."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        full_float32_products(),
    ):
        yield
