"""``slothplug doctor``: what is here, which backend it means, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

import slothplug
from slothplug.kernels.backend import choose_backend, triton_importable, why_not_triton
from slothplug.plugins import operations
from slothplug.versions import PACKAGES, PEFT, Package


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    ``state`` "broken" means that training would not work, "untested" that it may, "failed" that it goes on without.
    """

    subject: str
    found: str
    state: Literal["ok", "absent", "untested", "failed", "broken"]
    advice: str = ""


def run_doctor() -> int:
    """Prints the table; 0 where training would work, else 1."""
    console = Console()
    findings = [*_packages(), *_devices(), _plugins(), *_operations()]
    findings.append(_training(findings))
    findings += _plugin_faults()
    table = Table(title=f"slothplug {slothplug.__version__}, Python {platform.python_version()}", title_justify="left")
    for column in ("", "found", "state"):
        table.add_column(column)
    colour = {"ok": "green", "absent": "dim", "untested": "yellow", "failed": "red", "broken": "red"}
    for finding in findings:
        table.add_row(finding.subject, finding.found, f"[{colour[finding.state]}]{finding.state}[/]")
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(f"{finding.subject}: {finding.advice}", markup=False, highlight=False)
    broken = any(finding.state == "broken" for finding in findings)
    console.print("Training would not work yet." if broken else "Ready to train.", highlight=False)
    return int(broken)


def _packages() -> Iterator[Finding]:
    for package in PACKAGES:
        try:
            version = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            yield _absent(package)
        else:
            yield judge(package, version)


def _absent(package: Package) -> Finding:
    if package.needed:
        return Finding(package.name, "not installed", "broken", f"needed for {package.use}: {package.install}")
    wanted = package is PEFT or (package.name == "triton" and torch.cuda.is_available())
    advice = f"for {package.use}: {package.install}" if wanted else ""
    return Finding(package.name, f"not installed ({package.use})", "absent", advice)


def judge(package: Package, version: str) -> Finding:
    """Whether ``version`` of ``package`` is one that slothplug supports, and was tested with."""
    age = package.age(version)
    if age == "too old":
        advice = f"{version} is older than {package.lowest}, the oldest supported: {package.install}"
        return Finding(package.name, version, "broken", advice)
    if age == "untested":
        advice = f"{version} is newer than {package.newest}, the newest tested; a tested one: {package.install}"
        return Finding(package.name, version, "untested", advice)
    return Finding(package.name, version, "ok")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that PyTorch sees", "absent", _why_no_gpu())
        yield _backend(torch.device("cpu"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(
            f"GPU {index}",
            f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}",
            "ok",
        )
        yield _backend(torch.device("cuda", index))


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this PyTorch ({torch.__version__}) is for CPUs; with an NVIDIA GPU: pip install --force-reinstall torch"
        )
    return "PyTorch is built for GPUs and finds none; see nvidia-smi for the driver. Kernels run in PyTorch on the CPU"


def _backend(device: torch.device) -> Finding:
    reason = why_not_triton(device)
    advice = ""
    if reason and device.type == "cuda" and not triton_importable():
        advice = "without Triton the GPU is served by plain PyTorch: pip install triton"
    return Finding(
        f"backend on {device}", f"{choose_backend(device)}" + (f": {reason}" if reason else ""), "ok", advice
    )


def _plugins() -> Finding:
    manager = slothplug.plugin_manager()
    names = [name for name, plugin in manager.list_name_plugin() if plugin is not None]
    return Finding("plugins", ", ".join(names), "ok")


def _plugin_faults() -> Iterator[Finding]:
    """What third-party plugins have done wrong in this process, the training step included."""
    manager = slothplug.plugin_manager()
    for plugin, sentence in dict.fromkeys((*manager.load_faults, *manager.faults)):
        yield Finding(f"plugin {plugin}", "left out", "failed", f"{sentence}. Mend the plugin, or uninstall it")


def _operations() -> Iterator[Finding]:
    for operation in operations():
        yield Finding(f"operation {operation.name}", operation.summary, "ok")


def _training(findings: list[Finding]) -> Finding:
    """One patched training step, where nothing found so far forbids it."""
    subject = "training step"
    if any(finding.state == "broken" for finding in findings):
        return Finding(subject, "not tried", "absent")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return Finding(subject, self_test(device), "ok")
    except Exception as error:  # the doctor's job is to say what is wrong, whatever it is
        return Finding(subject, "failed", "broken", f"{type(error).__name__}: {error}")


def self_test(device: torch.device) -> str:
    """Trains a one-layer Llama for one step on ``device`` with the flag on, with LoRA where PEFT is installed.

    Returns what was fused.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(device)
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    report = slothplug.patch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32, device=device).view(1, -1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    if not loss.isfinite():
        raise ArithmeticError(f"the loss of the first step is {loss.item()}")
    return report.summary().removeprefix("slothplug: ")
