"""The GPUs that the kernels are built for, and what one thread block may use there. Plain data; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass

_CUDA = "CUDA C++ Programming Guide, Compute Capabilities, table 'Technical Specifications per Compute Capability'"
_CDNA3 = (
    "AMD Instinct MI300 (CDNA3) ISA reference guide, sections 2.1 'wavefront' and 12 'data share'; HIP hardware limits"
)


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        backend, arch: as Triton's ``GPUTarget`` has them: ``"cuda"`` and the capability, ``"hip"`` and the gfx name.
        warp_width: threads of a warp (wavefront).
        max_threads_per_block: threads of a block (workgroup).
        max_shared_bytes: shared memory (LDS) of a block, with the opt-in that Triton makes beyond 48 KiB.
        source: where the limits are written.
    """

    backend: str
    arch: int | str
    warp_width: int
    max_threads_per_block: int
    max_shared_bytes: int
    source: str

    @property
    def name(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def why_not(self, threads: int, shared_bytes: int) -> str | None:
        """Why a block of that many threads and bytes of shared memory cannot be launched; None where it can."""
        if threads > self.max_threads_per_block:
            return f"{threads} threads a block, {self.name} allows {self.max_threads_per_block}"
        if shared_bytes > self.max_shared_bytes:
            return f"{shared_bytes} bytes of shared memory a block, {self.name} allows {self.max_shared_bytes}"
        return None


TARGETS = (
    Target("cuda", 75, 32, 1024, 64 * 1024, _CUDA),
    Target("cuda", 80, 32, 1024, 163 * 1024, _CUDA),
    Target("cuda", 86, 32, 1024, 99 * 1024, _CUDA),
    Target("cuda", 89, 32, 1024, 99 * 1024, _CUDA),
    Target("cuda", 90, 32, 1024, 227 * 1024, _CUDA),
    Target("cuda", 100, 32, 1024, 227 * 1024, _CUDA),
    Target("cuda", 120, 32, 1024, 99 * 1024, _CUDA),
    Target("hip", "gfx942", 64, 1024, 64 * 1024, _CDNA3),
)
