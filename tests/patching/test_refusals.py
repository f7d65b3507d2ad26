"""What cannot be served is refused, or left, with a sentence that names what was found."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.kernels import backend
from slothplug.patching.private_class import is_patched
from slothplug.patching.sites import Left, Operation, Refusal
from slothplug.plugins import plugin_manager
from tests.patching.device import cpu_only

IDS = torch.arange(48).view(2, 24)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "triton", None)
    backend.triton_importable.cache_clear()
    yield
    backend.triton_importable.cache_clear()


@pytest.mark.usefixtures("without_triton")
def test_triton_asked_for_where_there_is_none(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    with pytest.raises(slothplug.SettingsError, match=r"backend is 'triton', but Triton is not installed"):
        slothplug.patch(model, {"backend": "triton"})
    assert not any(is_patched(module) for module in model.modules())
    report = slothplug.patch(model)
    assert {site.backend for site in report.fused} == {"torch"}
    assert any("kernels run on PyTorch: Triton is not installed" in note for note in report.notes)


@cpu_only
def test_triton_asked_for_on_a_cpu(tiny_llama: Callable[..., nn.Module]) -> None:
    if backend.triton_importable():
        with pytest.raises(slothplug.SettingsError, match=r"backend is 'triton', but the model is on a CPU"):
            slothplug.patch(tiny_llama(), {"backend": "triton"})
    assert not any("PyTorch" in note for note in slothplug.patch(tiny_llama(), {"backend": "torch"}).notes)


def test_triton_asked_for_on_an_old_gpu(tiny_llama: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "triton_importable", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("slothplug.patching.admission.home", lambda module: torch.device("cuda"))
    with pytest.raises(slothplug.SettingsError, match=r"Tesla V100 has compute capability 7\.0, Triton needs 7\.5"):
        slothplug.patch(tiny_llama(), {"backend": "triton"})
    assert backend.choose_backend(torch.device("cuda")) == "torch"
    assert any("Tesla V100" in note for note in slothplug.patch(tiny_llama()).notes)


def test_on_a_machine_without_gpu_and_triton_the_numbers_are_stocks() -> None:
    """https://github.com/triton-lang/triton/issues/6150, https://github.com/unslothai/unsloth/issues/852"""
    script = """
        import sys
        sys.modules["triton"] = None
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        import slothplug
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        ids = torch.arange(12)[None]
        expected = model(input_ids=ids, labels=ids).loss
        report = slothplug.patch(model)
        got = model(input_ids=ids, labels=ids).loss
        assert report.fused and not report.left, report
        torch.testing.assert_close(got, expected)
        print([note for note in report.notes if "PyTorch" in note])
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout


class SumOfSquares:
    """A plugin that knows norms, as an operation of its own, and cannot serve them."""

    @hookimpl
    def slothplug_operations(self) -> list[Operation]:
        return [Operation("sum_of_squares", "for a test")]

    @hookimpl
    def slothplug_find_sites(self, model: nn.Module) -> list[Left]:
        norms = [(name, module) for name, module in model.named_modules() if "Norm" in type(module).__name__]
        return [Left("sum_of_squares", name, module, Refusal("not today", excused=True)) for name, module in norms]


def test_a_module_left_by_one_operation_is_served_by_another(tiny_llama: Callable[..., nn.Module]) -> None:
    plugin = SumOfSquares()
    plugin_manager().register(plugin)
    try:
        report = slothplug.patch(tiny_llama())
    finally:
        plugin_manager().unregister(plugin)
    statuses = {op: {site.status for site in sites} for op, sites in report.by_op().items()}
    assert statuses["sum_of_squares"] == {"left"}
    assert statuses["rms_norm"] == {"fused"}


class Gated(nn.Module):
    """A model that is a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_a_model_that_is_a_site_itself() -> None:
    model, stock = Gated(), Gated()
    stock.load_state_dict(model.state_dict())
    for _ in range(2):
        report = slothplug.patch(model)
        assert [(site.op, site.name, site.status) for site in report.sites] == [("glu", "", "fused")]
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), stock(x))
    assert report.fused[0].calls.served == 1
    slothplug.unpatch(model)
    assert type(model) is Gated
