"""Modes in which probes run: seeds of their own, no autocast, no TF32; all is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Seeds for a probe; afterwards the generators of the CPU and of every GPU are where they were."""
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        seed_generators(0)
        yield


@contextmanager
def full_float32_products() -> Iterator[None]:
    """No TF32, nor bfloat16 on CPUs, for products of float32: two ways to one result differ by 1e-3 with it.

    Trainers allow it for a whole run (Axolotl wherever the GPU has it, transformers with ``tf32=True``).
    """
    matmuls: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    matmuls = tuple(matmul for matmul in matmuls if hasattr(matmul, "fp32_precision"))
    precision = _float32_matmul_precision()
    before: list[tuple[Any, str]] = []
    try:
        if precision is not None:
            before += [(matmul, matmul.fp32_precision) for matmul in matmuls]
            torch.set_float32_matmul_precision("highest")
        # What all inherit from comes first: a switch that inherits is off with it, and must go on inheriting.
        for switch in (torch.backends, *matmuls) if matmuls else ():
            if switch.fp32_precision != "ieee":
                before.insert(0, (switch, switch.fp32_precision))
                switch.fp32_precision = "ieee"
        yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for switch, value in before:
            switch.fp32_precision = value


def _float32_matmul_precision() -> str | None:
    """None where the newer switches were used, which torch does not let one mix with this."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def seed_generators(seed: int) -> None:
    """Seeds the CPU, and every GPU that is in use.

    ``torch.manual_seed`` would also leave an order to seed the GPUs once CUDA starts, in place of the user's own.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def stock_modes(device: torch.device) -> Iterator[None]:
    """Modes in which probes run, whatever the caller's: gradients on, no inference mode, no autocast, no TF32."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        full_float32_products(),
    ):
        yield
