"""``verify`` passes what is as exact as stock, and catches kernels that are subtly not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from typer.testing import CliRunner

import slothplug
from slothplug.cli import verify
from slothplug.cli.float64 import Float64
from slothplug.cli.main import app
from slothplug.cli.verify_model import Request, model_of
from slothplug.errors import SlothplugError
from slothplug.kernels.rms_norm import rms_norm
from slothplug.patching.sites import Kernel, Refusal
from slothplug.settings import Settings

runner = CliRunner(env={"COLUMNS": "160"})
LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
NORM_ONLY = Settings(ops=["rms_norm"], verify=False)


class Tampered:
    """A plugin whose rms_norm changes the output of the true one."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    @slothplug.hookimpl
    def slothplug_kernel(self, operation: str) -> Kernel | None:
        if operation != "rms_norm":
            return None
        return Kernel(f"tampered {id(self)}", "torch", lambda *args, **kwargs: self.change(rms_norm(*args, **kwargs)))


@pytest.fixture
def tamper() -> Iterator[Callable[[Callable[[torch.Tensor], torch.Tensor]], None]]:
    plugins: list[Tampered] = []

    def register(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        plugins.append(Tampered(change))
        slothplug.plugin_manager().register(plugins[-1])

    yield register
    for plugin in plugins:
        slothplug.plugin_manager().unregister(plugin)


def one_row_off(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[:, :1] * 1.02, y[:, 1:]], dim=1) if y.shape[1] > 1 else y


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [0, 4])
def test_a_patched_llama_is_as_exact_as_stock(config: Path, dtype: str, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    model = model_of(Request(str(config), layers=2, lora=lora, dtype=dtype, device="cpu"))
    verdict = verify.compare(model, Settings(), draws=16, tokens=24)
    assert len(verdict.report.fused) >= 5
    assert verdict.unequal == {}
    assert {"loss", "logits"} < verdict.kinds.keys()
    assert not any(slothplug.patching.private_class.is_patched(module) for module in model.modules())


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        ("float32", lambda y: y * 1.00001),
        ("float32", lambda y: y.bfloat16().float()),
        ("bfloat16", lambda y: (y.float() * 1.01).to(y.dtype)),
        ("bfloat16", one_row_off),
        ("float32", lambda y: y * float("nan")),
    ],
    ids=["scale", "rounding", "scale in bfloat16", "one row", "nan"],
)
def test_a_kernel_that_is_off_is_caught(
    config: Path, tamper: Callable[..., None], dtype: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tamper(change)
    model = model_of(Request(str(config), layers=2, dtype=dtype, device="cpu"))
    verdict = verify.compare(model, NORM_ONLY, draws=8, tokens=24)
    assert verdict.report.fused
    assert verdict.unequal


def test_the_command_says_equal_and_exits_with_0(config: Path) -> None:
    result = runner.invoke(app, ["verify", str(config), "--layers", "1", "--draws", "4", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for words in ("LlamaForCausalLM", "rms_norm", "logits", "layers.*.self_attn.q_proj.weight", "as exact as stock"):
        assert words in result.output


def test_the_command_names_what_is_worse_and_exits_with_1(
    config: Path, tamper: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper(lambda y: y * 1.001)
    monkeypatch.setattr(verify, "Settings", lambda: NORM_ONLY)
    result = runner.invoke(app, ["verify", str(config), "--layers", "1", "--draws", "4", "--device", "cpu"])
    assert result.exit_code == 1
    assert "worse than stock: logits: (a) energy" in result.output


def test_a_saved_model_and_a_model_type_are_taken(config: Path, tmp_path: Path) -> None:
    built = model_of(Request(str(config), layers=1, device="cpu"))
    built.save_pretrained(tmp_path / "saved")
    loaded = model_of(Request(str(tmp_path / "saved"), device="cpu"))
    assert torch.equal(built.state_dict()["model.norm.weight"], loaded.state_dict()["model.norm.weight"])
    assert sum(p.numel() for p in model_of(Request("qwen3", device="cpu")).parameters()) < 1e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "neither a folder"),
        (["llama", "--dtype", "int8"], "--dtype int8 is not one of"),
        (["llama", "--device", "banana"], "no device"),
        (["llama", "--device", "cuda:99"], "PyTorch sees"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_status_2(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SlothplugError, match=r"is not a model's config"):
        model_of(Request(str(tmp_path), device="cpu"))


def test_the_reference_is_float64_where_double_alone_is_not() -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-6).double()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(8, 64, dtype=torch.float64)
    exact = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def error(y: torch.Tensor) -> float:
        return (y - exact).abs().max().item()

    assert error(norm(x)) > 1e-9
    with Float64():
        assert error(norm(x)) < 1e-14


def test_fused_sites_that_never_ran_are_no_equality(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every call falls back, both sides are stock, and equal numbers say nothing."""
    monkeypatch.setattr("slothplug.ops.rms_norm.forward._why_not", lambda *_: Refusal("always"))
    monkeypatch.setattr(verify, "Settings", lambda: NORM_ONLY)
    result = runner.invoke(app, ["verify", str(config), "--layers", "1", "--draws", "2", "--device", "cpu"])
    assert result.exit_code == 1
    assert "rms_norm was fused and never ran fused (always)" in " ".join(result.output.split())
