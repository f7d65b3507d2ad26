"""Compiles the kernels for GPUs that are not there; ``offline_cases.py`` has the cases.

A case is compiled for every target; where it is for newer GPUs only (a tile that the host picks there), say so with
``dataclasses.replace(case, targets=("sm_90", "sm_100"))``. A case costs about 0.2 s of CPU time a target, 1 to 2 s with
``tl.dot``; equal cases are compiled once.

A process that compiles must not have ``TRITON_INTERPRET=1`` set when the kernels are imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slothplug.kernels.triton.launch import wider_warps
from tests.kernels.targets import Target

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class OfflineCase:
    """One kernel as one launch would specialise it.

    Attributes:
        kernel: the ``@triton.jit`` function.
        signature: Triton type of each argument that is not in ``constexprs``, as in ``triton.tools.compile``:
            ``"*bf16"``, ``"i32"``, ``"fp32"``; followed by ``":16"`` where the value (the address) is a multiple of 16.
        constexprs: the other arguments: ``tl.constexpr`` parameters, integers equal to 1, pointers that are None.
        num_warps: warps of 32 threads, as ``launch`` takes them.
        num_stages: launch option; None is Triton's default.
        enable_fp_fusion: launch option.
        targets: names of the targets to compile for; None is all of ``TARGETS``.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int | None = None
    enable_fp_fusion: bool = True
    targets: tuple[str, ...] | None = None

    @classmethod
    def of_launch(cls, kernel: Any, *arguments: Any, **keywords: Any) -> OfflineCase:
        """The case that ``kernel[grid](*arguments, **keywords)`` would compile; tensors may be on the meta device."""
        options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
        signature, constexprs = {}, {}
        for parameter in kernel.params:
            value = values.pop(parameter.name)
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                constexprs[parameter.name] = value
            else:
                signature[parameter.name] = _triton_type(value)
        if values:
            raise TypeError(f"{kernel.__name__} has no parameter {', '.join(values)}")
        return cls(kernel, signature, constexprs, **options)

    def __str__(self) -> str:
        """Equal for cases that compile to the same code."""
        options = ", ".join(f"{name}={getattr(self, name)}" for name in (*_OPTIONS, "targets"))
        return f"{self.kernel.__name__}({self.signature}, {self.constexprs}, {options})"


def _triton_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0  # allocators align the storage itself
        return _POINTERS[value.dtype] + (":16" if aligned else "")
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, bool):
        return "i1"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + (":16" if value % 16 == 0 else "")


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[OfflineCase]]:
    """Inside, a launch of any Triton kernel is recorded in the list and not run."""
    cases: list[OfflineCase] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        cases.append(OfflineCase.of_launch(kernel, *arguments, **keywords))

    run = triton.runtime.JITFunction.run
    triton.runtime.JITFunction.run = record
    try:
        yield cases
    finally:
        triton.runtime.JITFunction.run = run


def compile_case(case: OfflineCase, target: Target) -> tuple[int, int]:
    """Compiles to the target's machine code; returns the threads and the bytes of shared memory of a block.

    Raises what Triton raises where the kernel does not compile.
    """
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(case.kernel.arg_names)
        if case.signature.get(name, "").endswith(":16")
    }
    source = ASTSource(
        case.kernel,
        {name: case.signature.get(name, "constexpr").removesuffix(":16") for name in case.kernel.arg_names},
        {
            (index,): case.constexprs[name]
            for index, name in enumerate(case.kernel.arg_names)
            if name in case.constexprs
        },
        attributes,
    )
    num_warps = wider_warps(case.num_warps, target.warp_width)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": case.enable_fp_fusion}
    if case.num_stages is not None:
        options["num_stages"] = case.num_stages
    compiled = triton.compile(source, GPUTarget(target.backend, target.arch, target.warp_width), options)
    return compiled.metadata.num_warps * target.warp_width, compiled.metadata.shared
