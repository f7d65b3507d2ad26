"""What records or transforms a patched model gets stock's numbers: compilers, torch.func and autograd's modes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad

from tests.patching.full_and_lora import IDS, assert_same, core, full, gradients, lora, pair, reasons, step


def one_layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Models of one layer: tracing takes seconds for each."""

    def shortened() -> nn.Module:
        torch.manual_seed(0)
        model = make()
        del core(model).model.layers[1]
        return model

    return shortened


def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    model, stock, report = pair(one_layer(lora))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        assert_same(step(compiled), step(stock))
    assert counter.frame_count == 1
    assert {site.calls.served for site in report.fused} == {0}
    assert not reasons(report)
    assert_same(step(model), step(stock))
    torch._dynamo.reset()


def test_a_compiled_model_is_compiled_once_whatever_was_counted_in_between() -> None:
    torch._dynamo.reset()
    model, stock, _ = pair(one_layer(full))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    step(compiled)
    graphs = counter.frame_count
    for _ in range(2):
        step(model)
        assert_same(step(compiled), step(stock))
    assert counter.frame_count == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_model(make: Callable[[], nn.Module], strict: bool) -> None:
    model, stock, _ = pair(one_layer(make))
    inputs = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    exported = torch.export.export(model.eval(), (), inputs, strict=strict).module()
    torch.testing.assert_close(exported(**inputs).loss, stock.eval()(**inputs).loss)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model(make: Callable[[], nn.Module]) -> None:
    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False, return_dict=False)[0]

    model, stock, report = pair(make)
    try:
        torch.jit.trace(Logits(stock.eval()), (IDS,), check_trace=False)
    except (IndexError, RuntimeError) as error:
        pytest.skip(f"transformers {transformers.__version__} cannot be traced unpatched: {error}")
    traced = torch.jit.trace(Logits(model.eval()), (IDS,), check_trace=False)
    torch.testing.assert_close(traced(IDS + 1), stock.eval()(input_ids=IDS + 1).logits)
    assert "traced by torch.jit" in reasons(report)


def test_functional_call_trains_the_tensors_that_it_is_given(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    outcomes = []
    for one in (model, stock):
        given = {name: (p.detach() * 1.1).requires_grad_(p.requires_grad) for name, p in one.named_parameters()}
        loss = torch.func.functional_call(one, given, (), {"input_ids": IDS, "labels": IDS}).loss
        loss.backward()
        assert not gradients(one)
        outcomes.append((loss.detach(), {name: p.grad for name, p in given.items() if p.grad is not None}))
    assert_same(*outcomes)
    assert not reasons(report)


def test_functional_gradients(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    outcomes = []
    for one in (model, stock):

        def loss(parameters: dict[str, torch.Tensor], one: nn.Module = one) -> torch.Tensor:
            return torch.func.functional_call(one, parameters, (), {"input_ids": IDS, "labels": IDS}).loss

        found, value = torch.func.grad_and_value(loss)({name: p.detach() for name, p in one.named_parameters()})
        outcomes.append((value, found))
    assert_same(*outcomes)
    assert "transformed by torch.func" in reasons(report)


def logits_of(model: nn.Module, **inputs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda embedded: model(inputs_embeds=embedded, use_cache=False, **inputs).logits


def test_tangents_and_batches(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    x, tangent = torch.randn(2, 2, 5, 32)
    for got, expected in zip(
        *(torch.func.jvp(logits_of(one), (x,), (tangent,)) for one in (model, stock)), strict=True
    ):
        torch.testing.assert_close(got, expected)
    many, mask = torch.randn(3, 2, 5, 32), torch.zeros(2, 1, 5, 5)
    got, expected = (torch.func.vmap(logits_of(one, attention_mask=mask))(many) for one in (model, stock))
    torch.testing.assert_close(got, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        got, expected = (
            forward_ad.unpack_dual(one(inputs_embeds=dual, labels=IDS[:, :5]).loss).tangent for one in (model, stock)
        )
        assert expected is not None
        torch.testing.assert_close(got, expected)
    assert {"transformed by torch.func", "inside a forward-mode derivative"} <= reasons(report)


@pytest.mark.parametrize("labels", [True, False], ids=["loss", "logits"])
def test_a_second_derivative_is_refused(make: Callable[[], nn.Module], labels: bool) -> None:
    """Torch's own guard lets the second derivative of a loss through, without the kernels' part of it."""
    model, stock, _ = pair(make)
    for one in (stock, model):
        trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
        output = one(input_ids=IDS, labels=IDS if labels else None)
        value = output.loss if labels else output.logits.square().mean()
        if one is model:
            with pytest.raises(RuntimeError, match=r"no second derivative.*slothplug\.unpatch\(model\)"):
                torch.autograd.grad(value, trained, create_graph=True)
        else:
            first = torch.autograd.grad(value, trained, create_graph=True)
            torch.autograd.grad(sum(gradient.square().sum() for gradient in first), trained)
    assert_same(step(model), step(stock))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_saved_tensor_hooks_and_retained_graphs(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    expected = step(stock)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(step(model), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(step(model), expected)
    loss = model(input_ids=IDS, labels=IDS).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first, second = (torch.autograd.grad(loss, trained, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not reasons(report)


def test_nothing_of_a_call_waits_for_the_cycle_collector(make: Callable[[], nn.Module]) -> None:
    model, _, _ = pair(make)
    hidden: list[Any] = []
    core(model).model.norm.register_forward_hook(lambda module, args, output: hidden.append(weakref.ref(output)))
    gc.disable()
    try:
        step(model)
        model(input_ids=IDS, labels=IDS).logits.sum()
        model(input_ids=IDS)
        assert [reference() for reference in hidden] == [None] * 3
    finally:
        gc.enable()


def test_fake_tensors_go_to_the_original_forwards(make: Callable[[], nn.Module]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, _, report = pair(make)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(IDS)
        assert model(input_ids=ids, labels=ids, use_cache=False).loss.shape == ()
    assert "input of type FakeTensor" in reasons(report)
