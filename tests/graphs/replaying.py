"""A recorder that needs no GPU: it runs the recorded function again, and refuses where a recording would be wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class RunsAgain:
    """As ``CudaRecorder``: recording leaves no trace in the generator, and a replay runs all that was recorded.

    A graph reads the addresses that it recorded. Running again would read the addresses of now, so a replay compares
    them, and what else kernels depend on, with those at the recording.
    """

    records = False
    """Whether what runs now is a recording."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rehearse(self, function: Callable[[], None]) -> bool:
        generator = torch.get_rng_state()
        function()
        draws = not torch.equal(generator, torch.get_rng_state())
        torch.set_rng_state(generator)
        return draws

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        module = function.__self__._module  # type: ignore[attr-defined]
        recorded = _state_of(module())
        generator = torch.get_rng_state()
        self._run(function)
        torch.set_rng_state(generator)
        again = weakref.WeakMethod(function)  # a graph does not refer to what it recorded

        def replay() -> None:
            assert _state_of(module()) == recorded, "replayed in another state than the recorded one"
            self._run(again())  # type: ignore[arg-type]

        return replay

    @staticmethod
    def _run(function: Callable[[], None]) -> None:
        RunsAgain.records = True
        try:
            function()
        finally:
            RunsAgain.records = False

    def follow(self) -> None:
        pass

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def held_bytes(self) -> int:
        return 0

    def allocated_bytes(self) -> int:
        return 0

    def make_room(self, size: int) -> bool:
        return True


def _state_of(module: nn.Module) -> list[Any]:
    tensors = [(t.data_ptr(), t.dtype, t.requires_grad) for t in (*module.parameters(), *module.buffers())]
    adapters = [
        (part._disable_adapters, tuple(part.merged_adapters), str(part._active_adapter), dict(part.scaling))
        for part in module.modules()
        if hasattr(part, "_disable_adapters") and hasattr(part, "scaling")
    ]
    return [tensors, adapters, [part.training for part in module.modules()]]
