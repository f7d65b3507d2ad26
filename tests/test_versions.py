"""Versions outside the supported range are refused or noted, and every place that names a range names the same one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packaging.requirements import Requirement
from torch import nn

import slothplug
from slothplug.patching.private_class import is_patched
from slothplug.versions import PACKAGES, PEFT, TRANSFORMERS
from tests.hf.tiny import llama, with_lora

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
BY_NAME = {package.name: package for package in PACKAGES}


@pytest.mark.parametrize(
    ("package", "make", "words"),
    [
        (transformers, llama, r"transformers 4\.55\.4 is older than 4\.57.*pip install 'transformers>=4\.57,<5\.25'"),
        (peft, lambda: with_lora(llama()), r"peft 0\.17\.1 is older than 0\.18.*pip install 'peft>=0\.18,<0\.22'"),
    ],
    ids=["transformers", "peft"],
)
def test_too_old_is_refused_in_one_sentence_before_anything_changes(
    package: object, make: Callable[[], nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/unslothai/unsloth/pull/5538: what an old PEFT lacked broke at the first call."""
    model = make()
    classes = [type(module) for module in model.modules()]
    monkeypatch.setattr(package, "__version__", "4.55.4" if package is transformers else "0.17.1")
    with pytest.raises(slothplug.UnsupportedVersionError, match=words) as caught:
        slothplug.patch(model)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == classes
    assert not slothplug.patch(model, False).sites


def test_newer_than_tested_is_patched_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.99.0.dev0")
    monkeypatch.setattr(peft, "__version__", "1.0.0")
    model = with_lora(llama())
    report = slothplug.patch(model)
    assert report.fused
    assert [note.partition(",")[0] for note in report.notes[:2]] == [
        f"transformers 5.99.0.dev0 is newer than {TRANSFORMERS.newest}",
        f"peft 1.0.0 is newer than {PEFT.newest}",
    ]
    assert "note: peft 1.0.0" in str(report)


def test_only_what_the_model_is_made_of_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft, "__version__", "0.17.1")
    model = llama()
    assert slothplug.patch(model).fused
    monkeypatch.setattr(transformers, "__version__", "4.55.4")
    norm = nn.Sequential(nn.RMSNorm(8, eps=1e-6))
    slothplug.patch(norm)
    assert is_patched(norm[0])


def test_what_is_installed_here_is_within_the_range() -> None:
    assert not [note for note in slothplug.patch(with_lora(llama())).notes if "newer than" in note]
    assert TRANSFORMERS.age(transformers.__version__) == "tested"
    assert PEFT.age(peft.__version__) == "tested"
    assert BY_NAME["torch"].age(torch.__version__) == "tested"


def test_the_sets_of_versions_span_the_range() -> None:
    pins = {
        path.stem: dict(re.findall(r"^(\w+)==(\S+)$", path.read_text(), re.MULTILINE))
        for path in (ROOT / "tests" / "versions").glob("*.txt")
    }
    assert pins.keys() == {"newest", "axolotl", "llamafactory", "oldest"}
    for package in (TRANSFORMERS, PEFT):
        assert all(package.age(pin[package.name]) == "tested" for pin in pins.values())
        assert pins["newest"][package.name].startswith(f"{package.newest}.")


def test_the_package_demands_the_oldest_supported_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    demanded = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, lines)}
    for package in PACKAGES:
        if package.lowest:
            assert demanded[package.name] == f">={package.lowest}", package.name


def test_the_readme_names_the_range() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    for package, name in ((TRANSFORMERS, "transformers"), (PEFT, "PEFT")):
        assert f"{name} {package.lowest} to {package.newest}" in text
