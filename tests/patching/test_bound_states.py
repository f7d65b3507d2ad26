"""Norms, rotary embedding and gated MLPs decide once for each outermost call: every change of state is noticed at the
next call, of the whole model and of a part, and answered as stock answers it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

import slothplug
from slothplug.patching.forward_context import facts_of
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from tests.patching.test_hard_callers import replica

IDS = torch.arange(3, 43).view(2, 20)
OPS = ["rms_norm", "rotary", "glu"]


def parts(model: Any) -> dict[str, nn.Module]:
    """One served module of each operation."""
    layer = model.model.layers[0]
    return {"rms_norm": layer.post_attention_layernorm, "rotary": layer.self_attn, "glu": layer.mlp}


def served(model: nn.Module) -> dict[str, Served]:
    return {op: part.__dict__[STATE] for op, part in parts(model).items()}


def counts(model: nn.Module) -> dict[str, int]:
    return {op: state.calls.served for op, state in served(model).items()}


def facts_in_two_calls(model: nn.Module) -> list[dict[str, Any]]:
    """What each part's call takes for granted inside each of two calls of the model."""
    found: list[dict[str, Any]] = []
    hook = model.model.embed_tokens.forward  # type: ignore[union-attr]

    def asking(*args: Any) -> torch.Tensor:
        found.append({op: facts_of(state) for op, state in served(model).items()})
        return hook(*args)  # type: ignore[operator, no-any-return]

    asking.__module__ = "transformers.for_a_test"  # around code of the user's own nothing is bound
    model.model.embed_tokens.forward = asking  # type: ignore[union-attr, assignment]
    try:
        for _ in range(2):
            model(input_ids=IDS)
    finally:
        del model.model.embed_tokens.forward  # type: ignore[union-attr, operator]
    return found


@pytest.fixture
def pair(tiny_llama: Callable[..., nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A patched model that was called twice, and its unpatched copy."""
    model, stock = tiny_llama(), tiny_llama()
    assert not slothplug.patch(model, {"ops": OPS, "backend": "torch"}).left
    for _ in range(2):
        model(input_ids=IDS)
    return model, stock


def assert_stock(model: nn.Module, stock: nn.Module, falls_back: str | None = None) -> None:
    """Three calls of the model, which equal stock's; every operation but one is served."""
    for _ in range(3):
        before = counts(model)
        got, expected = (one(input_ids=IDS).logits for one in (model, stock))
        assert got.dtype is expected.dtype
        tolerance = 1e-5 if got.dtype is torch.float32 else 5e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert {op: after - before[op] for op, after in counts(model).items()} == {op: op != falls_back for op in OPS}


def test_facts_are_bound_and_stay_bound(pair: tuple[nn.Module, nn.Module]) -> None:
    model, _ = pair
    first, second = facts_in_two_calls(model)
    for op in OPS:
        assert first[op] is not None
        assert not isinstance(first[op], Refusal)
        assert first[op] is second[op]
    assert all(facts_of(state) is None for state in served(model).values())


def new_weight(model: Any) -> None:
    for part in (parts(model)["rms_norm"], model.model.layers[0].mlp.down_proj):
        part.weight = nn.Parameter(part.weight.detach() * 2)


def new_data(model: Any) -> None:
    for part in (parts(model)["rms_norm"], model.model.layers[0].mlp.down_proj):
        part.weight.data = part.weight.data * 2


def in_place(model: Any) -> None:
    with torch.no_grad():
        parts(model)["rms_norm"].weight.mul_(2)


def to_bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


def other_eps(model: Any) -> None:
    parts(model)["rms_norm"].variance_epsilon = 0.5


def other_child(model: Any) -> None:
    mlp = parts(model)["glu"]
    torch.manual_seed(3)
    mlp.down_proj, mlp.gate_proj = nn.Linear(64, 32), nn.Linear(32, 64)


def other_mode(model: Any) -> None:
    model.train(not model.training)


def hooked_around(model: Any) -> None:
    for part in parts(model).values():
        part.register_forward_hook(lambda _, args, output: None)


SERVED = [new_weight, new_data, in_place, to_bfloat16, other_eps, other_child, other_mode, hooked_around]


@pytest.mark.parametrize("change", SERVED)
def test_a_change_that_a_kernel_can_follow(
    change: Callable[[nn.Module], None], pair: tuple[nn.Module, nn.Module]
) -> None:
    for model in pair:
        change(model)
    assert_stock(*pair)


def other_activation(model: Any) -> None:
    parts(model)["glu"].act_fn = nn.Tanh()


def activation_of_another_forward(model: Any) -> None:
    parts(model)["glu"].act_fn.forward = torch.tanh


def hook_on_the_activation(model: Any) -> None:
    parts(model)["glu"].act_fn.register_forward_hook(lambda _, args, output: output * 2)


def eps_of_a_tensor(model: Any) -> None:
    parts(model)["rms_norm"].variance_epsilon = torch.tensor(0.5)


def weight_of_a_subclass(model: Any) -> None:
    class Scaled(nn.Parameter):
        pass

    norm = parts(model)["rms_norm"]
    norm.weight = Scaled(norm.weight.detach() * 2)


STOCK: list[tuple[Callable[[Any], None], str]] = [
    (other_activation, "glu"),
    (activation_of_another_forward, "glu"),
    (hook_on_the_activation, "glu"),
    (eps_of_a_tensor, "rms_norm"),
    (weight_of_a_subclass, "rms_norm"),
]


@pytest.mark.parametrize(("change", "op"), STOCK)
def test_a_change_that_stock_answers(
    change: Callable[[nn.Module], None], op: str, pair: tuple[nn.Module, nn.Module]
) -> None:
    for model in pair:
        change(model)
    assert_stock(*pair, falls_back=op)


@pytest.mark.parametrize("change", [*SERVED[1:], *(change for change, _ in STOCK)])
def test_a_part_that_is_called_by_itself(
    change: Callable[[nn.Module], None], pair: tuple[nn.Module, nn.Module]
) -> None:
    for model in pair:
        change(model)
    x = torch.randn(2, 5, 32, dtype=parts(pair[0])["rms_norm"].weight.dtype)  # type: ignore[arg-type]
    tolerance = 1e-5 if x.dtype is torch.float32 else 5e-2
    for op in ("rms_norm", "glu"):
        got, expected = (parts(model)[op](x) for model in pair)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def opposite(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return modeling_llama_rotary(q, k, cos, -sin, unsqueeze_dim)


modeling_llama_rotary = modeling_llama.apply_rotary_pos_emb
llama_attention = modeling_llama.LlamaAttention.forward


def doubled(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return llama_attention(self, 2 * hidden_states, *args, **kwargs)  # type: ignore[arg-type]


GLOBALS = [
    (modeling_llama, "apply_rotary_pos_emb", opposite),
    (modeling_llama, "rotate_half", lambda x: -x),
    (modeling_llama, "eager_attention_forward", None),
    (modeling_llama.LlamaAttention, "forward", doubled),
]


@pytest.mark.parametrize(("owner", "name", "value"), GLOBALS, ids=[name for _, name, _ in GLOBALS])
def test_a_global_of_an_attention_may_be_replaced(
    owner: Any, name: str, value: Any, pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value or (lambda *_, **__: None))
        assert_stock(*pair, falls_back="rotary")
    assert_stock(*pair)


def test_a_change_inside_a_call_is_no_reason_to_serve_the_next_call_otherwise(
    pair: tuple[nn.Module, nn.Module],
) -> None:
    model, stock = pair
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = (one(input_ids=IDS).logits for one in pair)
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
    assert_stock(model, stock)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_that_is_switched_on_later(training: bool) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.dropout(functional.silu(self.gate(x)) * self.up(x)))

    model = nn.Sequential(Drops())
    stock = copy.deepcopy(model)
    slothplug.patch(model, {"ops": ["glu"], "backend": "torch"})
    x = torch.randn(4, 16)
    for probability in (0.0, 0.5, 0.0):
        for one in (model, stock):
            one[0].dropout.p = probability
            one.train(training)
        for _ in range(3):
            torch.manual_seed(0)
            got = model(x)
            torch.manual_seed(0)
            torch.testing.assert_close(got, stock(x), rtol=1e-5, atol=1e-6)
    assert model[0].__dict__[STATE].calls.served == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, replica])
def test_copies_of_a_bound_model(copied: Callable[[nn.Module], nn.Module], pair: tuple[nn.Module, nn.Module]) -> None:
    model, stock = pair
    duplicate = copied(model)
    assert_stock(duplicate, stock)
    other_eps(model)
    new_weight(model)
    assert_stock(duplicate, stock)
