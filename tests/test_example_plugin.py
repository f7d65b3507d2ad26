"""The third-party plugins of docs/plugins.md, installed as a stranger's packages would be, and used."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slothplug import hookspecs

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "tests" / "example_plugin"
OPERATION = ROOT / "tests" / "example_operation"

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


NEW_OPERATION = """
import torch, slothplug

class DyT(torch.nn.Module):
    def __init__(self, alpha=0.5):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.full((1,), alpha))
        self.weight, self.bias = torch.nn.Parameter(torch.rand(16) + 0.5), torch.nn.Parameter(torch.randn(16))
    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight + self.bias

class Other(DyT):
    def forward(self, x):
        return torch.tanh(self.alpha + x) * self.weight + self.bias

torch.manual_seed(0)
model = torch.nn.Sequential(DyT(), torch.nn.Linear(16, 16), Other(), torch.nn.Linear(16, 16), DyT())
model.append(DyT().bfloat16())
x = torch.randn(4, 16)
def step():
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [parameter.grad.clone() for parameter in model.parameters()]
stock = step()
report = slothplug.patch(model, {"ops": ["dynamic_tanh"]})
torch.testing.assert_close(step(), stock)
print([(site.name, site.class_name, site.kernel, site.calls.served) for site in report.fused])
print([(site.name, site.reason[:31]) for site in report.left])
print([operation.summary for operation in slothplug.plugins.operations()][-1])
report.undo()
assert type(model[0]) is DyT
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(PLUGIN, tmp_path_factory.mktemp("site"))


def install(plugin: Path, target: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(plugin)], check=True, timeout=300)
    return target


def run(path: list[Path], use: str = USE) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", use], env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_its_kernel_and_its_site_are_used_and_reported(installed: Path) -> None:
    printed = run([installed, ROOT])
    assert "example [torch]" in printed
    assert printed.splitlines()[-1] == "[('0', 'LogWeightNorm', 'example', 1), ('2', 'RMSNorm', 'example', 1)]"


def test_without_it_the_built_in_finder_does_not_take_the_norm() -> None:
    assert run([ROOT]).splitlines()[-1] == "[('2', 'RMSNorm', 'rms_norm', 1)]"


def test_a_new_operation_is_found_proved_served_and_undone(tmp_path: Path) -> None:
    fused, left, summary = run([install(OPERATION, tmp_path), ROOT], NEW_OPERATION).splitlines()
    assert fused == "[('0', 'DyT', 'dynamic_tanh', 1), ('4', 'DyT', 'dynamic_tanh', 1)]"
    assert left == "[('2', 'kernel dynamic_tanh: output 0 d'), ('5', 'no kernel for torch.bfloat16')]"
    assert summary == "Dynamic Tanh with scale and shift in one pass"
    assert len((OPERATION / "slothplug_dynamic_tanh.py").read_text().splitlines()) <= 55


def test_the_documentation_quotes_them_word_for_word() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    for name in ("slothplug_example.py", "pyproject.toml"):
        assert (PLUGIN / name).read_text() in page
    for name in ("slothplug_dynamic_tanh.py", "pyproject.toml"):
        assert (OPERATION / name).read_text() in page


@pytest.mark.parametrize("path", [PLUGIN / "slothplug_example.py", OPERATION / "slothplug_dynamic_tanh.py"])
def test_a_plugin_imports_from_one_public_module(path: Path) -> None:
    imports = [line for line in path.read_text().splitlines() if "import" in line and "slothplug" in line.split()[1]]
    assert all(line.startswith(("from slothplug.plugin import", "from slothplug import plugin")) for line in imports)
    assert imports


def test_the_public_module_holds_what_it_lists() -> None:
    from slothplug import plugin

    assert sorted(plugin.__all__) == sorted(name for name in vars(plugin) if not name.startswith("__"))


def test_every_parameter_of_a_hook_is_documented() -> None:
    for name, hook in vars(hookspecs).items():
        if name.startswith("slothplug_"):
            for parameter in inspect.signature(hook).parameters:
                assert f"\n        {parameter}: " in hook.__doc__, f"{name}: {parameter}"
