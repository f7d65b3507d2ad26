"""The seam to CUDA: records what a function launches, and launches it again.

What is recorded reads and writes memory at fixed addresses. ``CudaRecorder`` is the only one that a run uses; tests put
one in its place that runs the function again, so that everything above the seam is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Replay(Protocol):
    """What was recorded."""

    def __call__(self) -> None:
        """Launches it again, on the current stream."""


class Recorder(Protocol):
    """Records on one device. All recordings of one recorder share their memory."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Records what ``function`` launches, and launches nothing itself.

        Raises:
            Exception: what ``function`` raises, or the device where it cannot record; nothing is being recorded then.
        """

    def generator_state(self) -> torch.Tensor:
        """Where the device's random numbers are."""

    def set_generator_state(self, state: torch.Tensor) -> None:
        """The device's random numbers go on from there."""

    def held_bytes(self) -> int:
        """Memory that recordings hold."""

    def allocated_bytes(self) -> int:
        """Memory of the tensors that are alive on the device."""

    def make_room(self, size: int) -> bool:
        """Whether ``size`` bytes fit beside the most that the process has reserved so far; frees what is cached."""


class CudaRecorder:
    """CUDA graphs in one private memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # A pool is given up with the last graph in it, and takes no graph after that.
        self._keeps_pool = self._graph_of(self._almost_nothing)

    def record(self, function: Callable[[], None]) -> Replay:
        return self._graph_of(function).replay

    def _graph_of(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        collects = gc.isenabled()
        gc.disable()  # a finaliser that frees device memory or an event would end the recording
        try:
            with torch.cuda.stream(self._stream):
                return self._captured(function, self._pool)
        finally:
            if collects:
                gc.enable()
            outer.wait_stream(self._stream)

    def _captured(self, function: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        """``function`` as a graph in ``pool``; None stands for one of its own."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, a data loader's for one, may go on allocating.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a recording that failed."""
        try:
            graph.capture_end()
        except RuntimeError:  # the device has declared the recording invalid, as after a wait for it
            torch.cuda.synchronize(self._device)
            # torch leaves two things as they were in the recording (2.11): the allocator goes on for this pool, and the
            # generator counts for the graph until another one ends.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._captured(self._almost_nothing, None)

    def _almost_nothing(self) -> None:
        torch.zeros(1, device=self._device)

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._device)

    def held_bytes(self) -> int:
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool))

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def make_room(self, size: int) -> bool:
        most, total = torch.cuda.max_memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[1]
        if most + size > total:
            return False
        torch.cuda.empty_cache()  # a recording cannot use what is cached for others
        return True
