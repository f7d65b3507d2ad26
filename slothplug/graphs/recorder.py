"""The seam to CUDA: records what a function launches, and launches it again.

What is recorded reads and writes memory at fixed addresses. ``CudaRecorder`` is the only one that a run uses; tests put
one in its place that runs the function again, so that everything above the seam is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch


class Replay(Protocol):
    """What was recorded."""

    def __call__(self) -> None:
        """Launches it again, on the current stream."""


class Recorder(Protocol):
    """Records on one device. All recordings of one recorder share their memory."""

    def rehearse(self, function: Callable[[], None]) -> bool:
        """Runs ``function`` without recording it, and returns whether it drew random numbers of the device.

        Raises:
            Exception: what ``function`` raises; RuntimeError where it waits for the device, which no recording can.
        """

    def record(self, function: Callable[[], None]) -> Replay:
        """Records what ``function`` launches.

        Raises:
            Exception: what ``function`` raises, or the device where it cannot record; nothing is being recorded then.
        """

    def follow(self) -> None:
        """What is launched from now on comes after what was replayed before, on whichever streams."""

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
        self._stream = torch.cuda.Stream(device)
        self._used_on = torch.cuda.current_stream(device)
        self._pools: list[Any] = []
        self._keep_pools: list[torch.cuda.CUDAGraph] = []
        self._new_pool()

    def follow(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if current != self._used_on:
            current.wait_stream(self._used_on)
            self._used_on = current

    def record(self, function: Callable[[], None]) -> Replay:
        collects = gc.isenabled()
        gc.disable()  # a finaliser that frees device memory or an event would end the recording
        try:
            with self._on_own_stream():
                return self._captured(function, self._pools[-1]).replay
        finally:
            if collects:
                gc.enable()

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def _new_pool(self) -> None:
        """A pool for what is recorded from now on."""
        self._pools.append(torch.cuda.graph_pool_handle())
        # A pool is given up with the last graph in it, and takes no graph after that.
        graph = torch.cuda.CUDAGraph()
        with self._on_own_stream():
            graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            graph.capture_end()
        self._keep_pools.append(graph)

    def rehearse(self, function: Callable[[], None]) -> bool:
        """See ``Recorder``. What waits for the device is not tried: torch does not recover well from recording it."""
        generator, mode = self.generator_state(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        draws = not torch.equal(generator, self.generator_state())
        self.set_generator_state(generator)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                place = f"{Path(warning.filename).name}, line {warning.lineno}"
                raise RuntimeError(f"it waits for the device ({place})")
        return draws

    def _captured(self, function: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, a data loader's for one, may go on allocating.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
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
            # torch leaves three things as they were in the recording (2.11): the allocators of the device and of pinned
            # memory go on for this pool, and the generator counts for the graph until another one ends.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pools[-1])
            self._new_pool()

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device)

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._device)

    def held_bytes(self) -> int:
        return sum(segment["total_size"] for pool in self._pools for segment in torch.cuda.memory_snapshot(pool))

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def make_room(self, size: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        most, now = (of(self._device) for of in (torch.cuda.max_memory_reserved, torch.cuda.memory_reserved))
        if most + size > now + free:
            return False
        torch.cuda.empty_cache()  # a recording cannot use what is cached for others
        return True
