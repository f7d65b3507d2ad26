"""A third party's plugin that fails: the run goes on without it, and the log, the report and the doctor name it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from torch import nn

import slothplug
from slothplug.patching.private_class import is_patched
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site

ROOT = Path(__file__).parent.parent
HOOKS = (
    "slothplug_operations", "slothplug_find_sites", "slothplug_kernel", "slothplug_conflicts",
    "slothplug_before_patch", "slothplug_after_patch",
)  # fmt: skip


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers a plugin named ``stranger`` with these hooks."""
    manager = slothplug.plugin_manager()

    def registered(**hooks: Callable[..., Any]) -> None:
        plugin = SimpleNamespace(**{name: slothplug.hookimpl(function) for name, function in hooks.items()})
        manager.register(plugin, "stranger")

    yield registered
    if manager.has_plugin("stranger"):
        manager.unregister(name="stranger")
    manager.faults.clear()


def norms() -> nn.Module:
    return nn.Sequential(nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6))


def oops() -> Any:
    raise KeyError("oops")


def yields_and_fails(model: nn.Module) -> Iterator[Left]:
    yield Left("rms_norm", "0", model[0], Refusal("said before the fault"))
    oops()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_left_out_and_named(
    hook: str, register: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    register(**{hook: oops})
    with caplog.at_level(logging.WARNING, "slothplug"):
        report = slothplug.patch(norms(), {"ops": ["rms_norm"]})
    assert len(report.fused) == 2
    (note,) = [note for note in report.notes if "stranger" in note]
    assert f"plugin 'stranger' failed in {hook}, and its answer was left out: KeyError: 'oops'" in note
    assert Path(__file__).name in note
    assert "stranger" in str(report)
    assert len([record for record in caplog.records if "stranger" in record.getMessage()]) == 1


def test_a_generator_that_fails_halfway_is_left_out_whole(register: Callable[..., None]) -> None:
    register(slothplug_find_sites=yields_and_fails)
    report = slothplug.patch(norms(), {"ops": ["rms_norm"]})
    assert len(report.fused) == 2
    assert any("KeyError: 'oops'" in note for note in report.notes)


def site(model: nn.Module, **changes: Any) -> Site[Any]:
    arguments: dict[str, Any] = {
        "op": "rms_norm", "name": "0", "module": model[0], "fast": oops, "spec": None,
        "kernel": Kernel("stranger", "torch", oops), "prove": oops, "verdict_key": "stranger",
    }  # fmt: skip
    return Site(**(arguments | changes))


@pytest.mark.parametrize(
    ("hook", "answer", "said"),
    [
        ("slothplug_operations", lambda: ["mine"], "expected Operation, found str"),
        ("slothplug_operations", lambda: 5, "'int' object is not iterable"),
        ("slothplug_find_sites", lambda model: [model[0]], "expected Site or Left, found RMSNorm"),
        ("slothplug_find_sites", lambda model: [Left("rms_norm", "0", model[0], "no")], "expected Refusal, found str"),
        ("slothplug_find_sites", lambda model: [site(model, op="mine")], "'mine', which no plugin introduces"),
        ("slothplug_find_sites", lambda model: [site(model, module="0")], "expected Module, found str"),
        ("slothplug_find_sites", lambda model: [site(model, kernel=None)], "expected Kernel, found NoneType"),
        ("slothplug_find_sites", lambda model: [site(model, prove=None)], "expected Callable, found NoneType"),
        ("slothplug_find_sites", lambda model: [site(model, verdict_key=[])], "unhashable type"),
        ("slothplug_find_sites", lambda model: [site(model, subsumes=5)], "'int' object is not iterable"),
        ("slothplug_find_sites", lambda model: [site(model, subsumes=[None])], "expected Module, found NoneType"),
        ("slothplug_operations", lambda: [Operation("mine", "", int)], "shared, which is no SharedState"),  # type: ignore[arg-type]
        ("slothplug_kernel", lambda: "mine", "expected Kernel, found str"),
        ("slothplug_kernel", lambda: Kernel("mine", "torch", None), "expected Callable, found NoneType"),  # type: ignore[arg-type]
        ("slothplug_conflicts", lambda: "a sentence", "expected several str, found one"),
        ("slothplug_conflicts", lambda: [1], "expected str, found int"),
    ],
)
def test_answers_of_other_types_are_left_out_and_named(
    hook: str, answer: Callable[..., Any], said: str, register: Callable[..., None]
) -> None:
    register(**{hook: answer})
    report = slothplug.patch(norms(), {"ops": ["rms_norm"]})
    assert [one.kernel for one in report.fused] == ["rms_norm", "rms_norm"]
    assert any(f"failed in {hook}" in note and said in note for note in report.notes), report.notes


def test_a_proof_that_returns_words_proves_nothing(register: Callable[..., None]) -> None:
    register(slothplug_find_sites=lambda model: [site(model, prove=lambda: "they differ")])
    (left,) = slothplug.patch(norms(), {"ops": ["rms_norm"]}).left
    assert left.reason == "its probe failed: TypeError: prove returned str, not Refusal or None"


def test_the_sites_cannot_be_changed_before_the_patch(register: Callable[..., None]) -> None:
    register(slothplug_before_patch=lambda sites: sites.clear())
    report = slothplug.patch(norms(), {"ops": ["rms_norm"]})
    assert len(report.fused) == 2
    assert any("failed in slothplug_before_patch" in note for note in report.notes)


def test_a_plugin_may_refuse_a_patch_by_an_error_of_slothplugs(register: Callable[..., None]) -> None:
    def refuse() -> None:
        raise slothplug.ConflictError("not with mine")

    register(slothplug_before_patch=refuse)
    model = norms()
    with pytest.raises(slothplug.ConflictError, match="not with mine"):
        slothplug.patch(model)
    assert not any(map(is_patched, model.modules()))


def test_a_built_in_plugin_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.ops.rms_norm.identify", lambda module: oops())
    with pytest.raises(KeyError, match="oops"):
        slothplug.patch(norms())


def test_an_unknown_hook_is_refused_when_it_is_registered(register: Callable[..., None]) -> None:
    with pytest.raises(pluggy.PluginValidationError, match="slothplug_find_site'"):
        register(slothplug_find_site=oops)
    assert not slothplug.plugin_manager().has_plugin("stranger")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import slothplug\n@slothplug.hookimpl\ndef slothplug_find_site(): ...", "unknown hook 'slothplug_find_site'"),
        ("import slothplug\n@slothplug.hookimpl\ndef slothplug_conflicts(modle): ...", "modle"),
    ],
)
def test_an_installed_plugin_that_cannot_be_loaded_is_noted_by_report_and_doctor(
    tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "stranger.py").write_text(source)
    information = tmp_path / "stranger-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[slothplug]\nstranger = stranger\n")
    use = (
        "import torch, slothplug\n"
        "from slothplug.cli import doctor\n"
        "report = slothplug.patch(torch.nn.Sequential(torch.nn.RMSNorm(16, eps=1e-6)), {'ops': ['rms_norm']})\n"
        "print(len(report.fused), *report.notes)\n"
        "doctor.self_test = lambda device: 'fine'\n"
        "print(doctor.run_doctor())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", use], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    patched, *doctor, status = done.stdout.splitlines()
    assert patched.startswith("1 ")
    for text in (patched, "\n".join(doctor)):
        assert "plugin 'stranger' (stranger) could not be loaded and is not used" in text
        assert said in text
    assert status == "0"


def test_the_doctor_shows_what_failed_in_its_training_step(register: Callable[..., None]) -> None:
    from typer.testing import CliRunner

    from slothplug.cli.main import app

    register(slothplug_find_sites=lambda model: oops())
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "plugin 'stranger' failed in slothplug_find_sites" in result.output
    assert "Mend the plugin, or uninstall it" in result.output
