"""What the package promises before any model is there: one version, types, and an import that changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import slothplug

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    ).stdout.strip()


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", slothplug.__version__)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    holders = [path for path in (ROOT / "slothplug").rglob("*.py") if f'"{slothplug.__version__}"' in path.read_text()]
    assert holders == [ROOT / "slothplug" / "__init__.py"]
    assert f"## {slothplug.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_ships_types_licence_and_command(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"slothplug-{slothplug.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "slothplug/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "slothplug = slothplug.cli.main:app" in entry_points
    assert "slothplug-llamafactory = slothplug.integrations.llamafactory.command:main" in entry_points
    assert "slothplug/integrations/llamafactory/worker/llamafactory_worker.py" in names
    assert "slothplug/integrations/bootstrap/slothplug_doors.py" in names
    assert not any(name.startswith("tests/") for name in names)


def test_importing_loads_no_framework() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import slothplug
heavy = {"triton", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "matplotlib", "typer"}
print(heavy & (sys.modules.keys() - before))
"""
    assert python(code) == "set()"


def test_importing_changes_nothing_of_torch() -> None:
    code = """
import torch, torch.nn.functional as F
def state():
    owners = (torch, torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.autograd, F)
    return {(str(owner), name): id(value) for owner in owners for name, value in vars(owner).items() if callable(value)}
before = state()
import slothplug
slothplug.plugin_manager()
after = state()
print([key for key in before.keys() & after.keys() if before[key] != after[key]], sorted(after.keys() - before.keys()))
"""
    assert python(code) == "[] []"


def test_it_imports_and_patches_where_triton_is_absent() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, slothplug
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8, eps=1e-6))
report = slothplug.patch(model, {"ops": ["rms_norm"]})
print([(site.name, site.backend) for site in report.fused])
"""
    assert python(code) == "[('1', 'torch')]"
