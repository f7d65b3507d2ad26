"""The third-party plugin of docs/plugins.md, installed as a stranger's package would be, and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "tests" / "example_plugin"

USE = """
import torch, slothplug

class LogWeightNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_weight, self.eps = torch.nn.Parameter(torch.randn(16) / 4), 1e-6
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.log_weight.exp()

torch.manual_seed(0)
model = torch.nn.Sequential(LogWeightNorm(), torch.nn.Linear(16, 16), torch.nn.RMSNorm(16, eps=1e-6))
x = torch.randn(4, 16)
def step():
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [parameter.grad.clone() for parameter in model.parameters()]
stock = step()
report = slothplug.patch(model, {"ops": ["rms_norm"]})
fast = step()
torch.testing.assert_close(fast, stock)
print(report)
print([(site.name, site.class_name, site.kernel, site.calls.served) for site in report.fused])
report.undo()
assert type(model[0]) is LogWeightNorm
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(PLUGIN)], check=True, timeout=300)
    return target


def run(path: list[Path]) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_its_kernel_and_its_site_are_used_and_reported(installed: Path) -> None:
    printed = run([installed, ROOT])
    assert "example [torch]" in printed
    assert printed.splitlines()[-1] == "[('0', 'LogWeightNorm', 'example', 1), ('2', 'RMSNorm', 'example', 1)]"


def test_without_it_the_built_in_finder_does_not_take_the_norm() -> None:
    assert run([ROOT]).splitlines()[-1] == "[('2', 'RMSNorm', 'rms_norm', 1)]"


def test_the_documentation_quotes_it_word_for_word() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    for name in ("slothplug_example.py", "pyproject.toml"):
        assert (PLUGIN / name).read_text() in page
