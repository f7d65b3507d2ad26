"""Logits that are read after an optimizer's step: refused where the step changed what they need, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slothplug import StaleLogitsError
from slothplug.ops.head.staleness import fingerprint
from tests.patching.device import DEVICE
from tests.patching.heads import IDS, LABELS, make, patched

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def trained(**changes: Any) -> tuple[Any, Any, torch.Tensor]:
    """A patched model after a backward, its output, and the logits that stock has."""
    model, stock = make(**changes), make(**changes)
    patched(model)
    output = model(input_ids=IDS, labels=LABELS)
    output.loss.backward()
    return model, output, stock(input_ids=IDS).logits.detach()


def assert_stale(output: Any) -> None:
    with pytest.raises(StaleLogitsError, match="an optimizer stepped"):
        output.logits + 0
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        output.logits.argmax(-1)


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lm_head" not in name and "embed" not in name]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_models_own_optimizer(tied: bool, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, output, _ = trained(tie_word_embeddings=tied)
    make_optimizer(model.parameters()).step()
    assert_stale(output)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("whose", ["another model's", "of other parameters of this model"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_optimizer_that_leaves_the_head_alone(
    whose: str, tied: bool, make_optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model, output, expected = trained(tie_word_embeddings=tied)
    parameters = others(model)
    if whose == "another model's":
        other = nn.Linear(3, 3)
        other(torch.ones(1, 3)).sum().backward()
        parameters = list(other.parameters())
    optimizer = make_optimizer(parameters)
    before = parameters[0].detach().clone()
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(parameters[0], before)
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(output.logits.detach() + 0, expected)


def test_several_optimizers_of_which_the_last_has_the_head() -> None:
    model, output, expected = trained()
    first, last = torch.optim.SGD(others(model), lr=1e-2), torch.optim.SGD([model.lm_head.weight], lr=1e-2)
    first.step()
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    last.step()
    assert_stale(output)


class Engine:
    """Steps float32 copies and writes the model's weights afterwards, as DeepSpeed does."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-2)

    def step(self, overflow: bool = False) -> None:
        if not overflow:
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad, weight.grad = weight.grad, None
            self.inner.step()
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.data.copy_(master.data)


def test_an_engine_that_steps_copies_of_the_weights() -> None:
    model, output, expected = trained()
    engine = Engine(model)
    engine.step(overflow=True)
    assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
    engine.step()
    assert_stale(output)


def test_an_optimizer_of_the_head_without_a_gradient_for_it_changes_nothing() -> None:
    model, output, expected = trained()
    model.lm_head.weight.grad = None
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert torch.equal(output.logits.detach() + 0, expected)


def test_gradients_that_the_step_itself_computes() -> None:
    model, output, _ = trained()
    model.zero_grad()

    def closure() -> torch.Tensor:
        loss = model(input_ids=IDS, labels=LABELS).loss
        loss.backward()
        return loss

    torch.optim.SGD(model.parameters(), lr=1e-2).step(closure)
    assert_stale(output)


def test_writes_by_hand() -> None:
    model, output, _ = trained()
    with torch.no_grad():
        model.lm_head.weight.add_(1e-3)
    with pytest.raises(StaleLogitsError, match="were written or replaced"):
        output.logits + 0
    model, output, _ = trained()
    torch.optim.SGD(others(model), lr=1e-2).step()
    model.lm_head.weight.data.add_(1e-3)  # seen since the weights were known when an optimizer stepped
    assert_stale(output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(97, 48), (97,)], ids=["weight", "bias"])
def test_a_fingerprint_tells_weights_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(0)).to(dtype)
    same = fingerprint(weight)
    assert (same.shape, same.dtype) == ((), torch.int64)
    assert torch.equal(fingerprint(weight.clone()), same)
    assert torch.equal(fingerprint(weight.t().contiguous().t()), same), "strides do not matter"
    bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
    changes = []
    for change in (
        lambda x: x.view(-1)[:1].add_(1),  # one unit in the last place
        lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0)),
        lambda x: x[:2].copy_(x[:2].flip(0)),
        lambda x: x.add_(1),
        lambda x: (x.view(-1)[0].add_(1), x.view(-1)[1].sub_(1)),
    ):
        changed = bits.clone()
        change(changed)
        changes.append(fingerprint(changed.view(dtype)).item())
    assert same.item() not in changes
    assert len(set(changes)) >= len(changes) - (len(shape) == 1), "two changes are the same one in a bias"


def test_a_fingerprint_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(97, 48)
    whole = fingerprint(weight)
    monkeypatch.setattr("slothplug.ops.head.staleness._CHUNK", 500)
    assert torch.equal(fingerprint(weight), whole)
