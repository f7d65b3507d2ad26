"""What ``torch.compile`` compiles runs stock: the report, a warning and strict mode say which modules, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import slothplug

IDS = torch.arange(24).view(2, 12)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrapped(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def by_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="eager")
    return module


@pytest.mark.parametrize("how", [wrapped, in_place, by_forward])
@pytest.mark.parametrize(
    ("path", "ops"),
    [
        ("model.norm", {"rms_norm"}),
        ("model.layers.0.mlp", {"glu"}),
        ("model.layers.0.self_attn", {"rotary"}),
        ("lm_head", {"head"}),
        ("model.layers.0", {"rms_norm", "glu", "rotary"}),
    ],
)
def test_a_compiled_module_is_left_with_the_reason(
    path: str, ops: set[str], how: Callable[[nn.Module], nn.Module], tiny_llama: Callable[..., nn.Module]
) -> None:
    model, stock = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    owner._modules[name] = how(model.get_submodule(path))
    report = slothplug.patch(model)
    assert {site.op for site in report.left} == ops
    for site in report.left:
        assert f"torch.compile compiles '{path}'" in site.reason
        assert not site.excused
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, stock(input_ids=IDS, labels=IDS).loss)
    report.undo()
    with pytest.raises(slothplug.NothingFusedError, match=r"torch\.compile compiles"):
        slothplug.patch(model, {"strict": True})


@pytest.mark.parametrize("how", [wrapped, in_place])
def test_a_compiled_model_fuses_nothing_and_says_so(
    how: Callable[[nn.Module], nn.Module], tiny_llama: Callable[..., nn.Module]
) -> None:
    model = how(tiny_llama(num_hidden_layers=1))
    with pytest.warns(slothplug.NothingFusedWarning, match="torch.compile compiles the whole model"):
        report = slothplug.patch(model)
    assert not report.fused


def test_layers_inside_a_module_that_is_not_compiled_are_called_as_they_are(
    tiny_llama: Callable[..., nn.Module],
) -> None:
    model, stock = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    model.model.layers[0].mlp.gate_proj.compile(backend="eager")
    report = slothplug.patch(model)
    assert not report.left
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, stock(input_ids=IDS, labels=IDS).loss)


def test_a_model_compiled_after_the_patch_warns_while_it_is_traced(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama(num_hidden_layers=1)
    slothplug.patch(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with pytest.warns(slothplug.NothingFusedWarning) as warned:
        compiled(input_ids=IDS, labels=IDS)
    for name in ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "Linear"):
        assert any(f"torch.compile compiles {name}, which slothplug serves" in str(one.message) for one in warned)
    compiled(input_ids=IDS, labels=IDS)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::slothplug.NothingFusedWarning")
def test_modules_compiled_after_the_patch_share_what_stock_modules_share(tiny_llama: Callable[..., nn.Module]) -> None:
    frames = []
    for patched in (False, True):
        torch._dynamo.reset()
        model = tiny_llama(num_hidden_layers=12)  # more than torch compiles one function for
        if patched:
            slothplug.patch(model)
        counter = CompileCounter()
        for layer in model.model.layers:
            layer.mlp.compile(backend=counter, fullgraph=True)
        model(input_ids=IDS, labels=IDS)
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]


@pytest.mark.filterwarnings("error::slothplug.NothingFusedWarning")
def test_an_export_is_no_training(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama(num_hidden_layers=1)
    slothplug.patch(model)
    torch.export.export(model.eval(), (), {"input_ids": IDS, "use_cache": False}, strict=False)
