"""Every kernel, with every set of launch knobs, compiles for every GPU we name and fits its limits; no GPU is needed.

Each target is one process of its own: this file, run as a script without Triton's interpreter. The same file holds what
must work where there is no GPU, or no Triton, at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import slothplug.kernels.triton
from tests.kernels.targets import TARGETS, Target

if TYPE_CHECKING:
    from tests.kernels.offline import OfflineCase

# It takes a minute of CPU time a target; a busy machine takes many times that.
WALL_CLOCK = 3600
pytestmark = pytest.mark.timeout(WALL_CLOCK)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# The modules of kernels/triton that define kernels or their launch knobs.
KERNEL_MODULES = [name for _, name, _ in pkgutil.iter_modules(slothplug.kernels.triton.__path__) if name != "launch"]
OPERATIONS = [name for _, name, package in pkgutil.iter_modules(slothplug.kernels.__path__) if not package]


def run_python(*arguments: str, cache: Path | None = None, **environment: str) -> str:
    """Standard output of a Python process that imports from here, compiles to ``cache`` and sees no GPU."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if cache is not None:
        variables["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=WALL_CLOCK,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Where all cases are compiled: one target for each way in which Triton lowers the arithmetic (without and with bfloat16
# instructions, AMD). The others get each kernel with each launch shape once, which decides threads and shared memory.
ALL_CASES = {"sm_75", "sm_90", "gfx942"}


def launch_shape(case: OfflineCase) -> tuple[object, ...]:
    sizes = {name: value for name, value in case.constexprs.items() if type(value) is int and name.isupper()}
    return case.kernel.__name__, case.num_warps, case.num_stages, *sorted(sizes.items())


def compile_for(target: Target) -> dict[str, str | None]:
    """For each case that is for ``target``, why it cannot run there; None where it can."""
    from tests.kernels.offline import compile_case
    from tests.kernels.offline_cases import CASES

    verdicts: dict[str, str | None] = {}
    for name, make_cases in CASES.items():
        cases = [case for case in make_cases() if case.targets is None or target.name in case.targets]
        key = str if target.name in ALL_CASES else launch_shape
        for case in {key(case): case for case in reversed(cases)}.values():
            try:
                verdict = target.why_not(*compile_case(case, target))
            except Exception as error:
                verdict = f"{type(error).__name__}: {error}"
            verdicts[f"{name}: {case}"] = verdict
    return verdicts


def find_gaps() -> list[str]:
    """What the modules define and no case has: a kernel, or the warps of a set of launch knobs."""
    from triton.runtime import JITFunction

    from tests.kernels.offline_cases import CASES

    cases = {name: make_cases() for name, make_cases in CASES.items()}
    compiled = {case.kernel.__name__ for of_module in cases.values() for case in of_module}
    gaps: list[str] = []
    defined: dict[str, JITFunction] = {}
    for name in KERNEL_MODULES:
        module = importlib.import_module(f"slothplug.kernels.triton.{name}")
        own = [f for f in vars(module).values() if isinstance(f, JITFunction) and f.fn.__module__ == module.__name__]
        defined |= {f.__name__: f for f in own}
        tables = [row for table in vars(module).values() for row in (table if isinstance(table, tuple) else (table,))]
        knobs = {row.num_warps for row in tables if hasattr(row, "num_warps") and not isinstance(row, type)}
        found = {case.num_warps for case in cases.get(name, ())}
        gaps += [f"{name}: num_warps={warps}" for warps in sorted(knobs - found)]
    called = {callee for f in defined.values() for callee in f.fn.__code__.co_names}
    # A function that another one calls is compiled with it.
    return gaps + sorted(defined.keys() - compiled - called)


@needs_triton
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_compiles_and_fits(target: Target, tmp_path: Path) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/231: 32 warps are 2048 threads where a wavefront has 64."""
    verdicts = json.loads(run_python(__file__, target.name, cache=tmp_path))
    assert verdicts
    assert not {case: verdict for case, verdict in verdicts.items() if verdict}


@needs_triton
def test_every_kernel_has_a_case() -> None:
    assert json.loads(run_python(__file__, "gaps")) == []


IMPORT_ALL = f"""
import importlib, sys
operations = [importlib.import_module("slothplug.kernels." + name) for name in {OPERATIONS}]
"""
IMPORT_KERNELS = f"""
kernels = [importlib.import_module("slothplug.kernels.triton." + name) for name in {KERNEL_MODULES}]
"""
COMPUTE = """
import torch
from slothplug.kernels.glu import ACTIVATIONS, glu
def compute(backend):
    gate = torch.ones(3, 5, requires_grad=True)
    for activation in ACTIVATIONS:
        out = glu(gate, gate, activation=activation, backend=backend)
        out.sum().backward()
        assert out.isfinite().all() and gate.grad.isfinite().all()
"""


@needs_triton
def test_imports_without_a_gpu() -> None:
    """https://github.com/triton-lang/triton/issues/6150: nothing may ask for a driver when it is imported."""
    run_python("-c", IMPORT_ALL + IMPORT_KERNELS + COMPUTE + "compute('torch')")


def test_works_without_triton() -> None:
    """https://github.com/unslothai/unsloth/issues/852"""
    run_python(
        "-c",
        "import sys; sys.modules['triton'] = None"
        + IMPORT_ALL
        + COMPUTE
        + """
from slothplug.kernels.backend import choose_backend, why_not_triton
assert choose_backend(torch.device("cpu")) == "torch"
assert "not installed" in why_not_triton(torch.device("cuda"))
compute("torch")
try:
    compute("triton")
except ImportError:
    sys.exit(0)
sys.exit("computed with Triton where there is none")
""",
    )


@needs_triton
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_forked_workers(backend: str) -> None:
    """https://github.com/triton-lang/triton/issues/6150: a data loader's worker is a fork of a process with kernels."""
    fork = """
import multiprocessing
context = multiprocessing.get_context("fork")
workers = [context.Process(target=compute, args=(BACKEND,), daemon=True) for _ in range(2)]
[worker.start() for worker in workers]
[worker.join(60) for worker in workers]
assert [worker.exitcode for worker in workers] == [0, 0]
""".replace("BACKEND", repr(backend))
    run_python("-c", IMPORT_ALL + IMPORT_KERNELS + COMPUTE + fork, TRITON_INTERPRET="1")


@needs_triton
def test_no_math_helper_that_moves() -> None:
    """https://github.com/triton-lang/triton/issues/4938: libdevice changes its place between releases of Triton."""
    hide = """
import sys, types
import triton.language as tl
empty = types.ModuleType("libdevice")
sys.modules["triton.language.extra.libdevice"] = sys.modules["triton.language.extra.cuda.libdevice"] = empty
for package in (tl.extra, tl.extra.cuda):
    package.libdevice = empty
"""
    run_python("-c", hide + IMPORT_ALL + IMPORT_KERNELS + COMPUTE + "compute('triton')", TRITON_INTERPRET="1")


if __name__ == "__main__":
    (request,) = sys.argv[1:]
    if request == "gaps":
        print(json.dumps(find_gaps()))
    else:
        print(json.dumps(compile_for(next(target for target in TARGETS if target.name == request))))
