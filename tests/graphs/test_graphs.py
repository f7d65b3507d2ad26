"""Steps whose layers are replayed equal eager patched steps to the bit; a change between two calls is noticed."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import slothplug
from slothplug.graphs.recorder import CudaRecorder
from slothplug.graphs.state import GraphState
from slothplug.patching.private_class import is_patched
from slothplug.patching.report import Report
from slothplug.patching.served import STATE, Served
from tests.graphs.replaying import RunsAgain
from tests.patching.conftest import on_device
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, LAYERS, assert_equal, layer, model

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]
OTHER = IDS[:, :7].contiguous()
ON = {"graphs": "auto", "graph_padding": False}
OFF = {"graphs": "off"}


def twins(**config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """Two equal patched models, the first with graphs, and the first one's report."""
    graphed = model(**config).to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    return graphed, eager, slothplug.patch(graphed, ON)


def state_of(one: nn.Module) -> GraphState:
    states = (part.__dict__.get(STATE) for part in one.modules())
    return next(s.shared for s in states if isinstance(s, Served) and s.op == "graphs")


def replays(one: nn.Module) -> int:
    return state_of(one).replays


def generator() -> torch.Tensor:
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


def step(one: nn.Module, ids: torch.Tensor = IDS, zero: bool = True, **options: Any) -> Outcome:
    if zero:
        one.zero_grad()
    torch.manual_seed(3)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=options.pop("autocast", False)):
        loss = one(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}, generator()


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert [name for name in theirs[1] if not torch.equal(ours[1][name], theirs[1][name])] == []
    assert torch.equal(ours[2], theirs[2])


def move(one: nn.Module) -> None:
    """An optimizer's step."""
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def train(graphed: nn.Module, eager: nn.Module, steps: int, **options: Any) -> None:
    for _ in range(steps):
        assert_same(step(graphed, **options), step(eager, **options))
        move(graphed)
        move(eager)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_steps_are_equal_to_the_bit(kind: str, dropout: float, autocast: bool) -> None:
    graphed, eager, report = twins(kind=kind, lora_dropout=dropout)
    train(graphed, eager, 5, autocast=autocast)
    assert replays(graphed) == 3 * LAYERS
    lora = [site for site in report.fused if site.op == "lora"]
    assert {site.calls.served for site in lora} == {5}
    assert f"graphs: {LAYERS} layers recorded for 1 shape" in str(report)


def test_attention_with_dropout() -> None:
    """Attention that is recorded keeps its random numbers on the device: its backward must be recorded, too."""
    eager = model().to(DEVICE)
    for part in eager.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.2
    graphed = copy.deepcopy(eager)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, ON)
    train(graphed, eager, 5)
    assert replays(graphed) == 3 * LAYERS


def test_lengths_that_recur_are_recorded_and_others_run_eagerly() -> None:
    graphed, eager, report = twins()
    for length in (10, 7, 10, 5, 10, 7, 4, 10, 7):
        ids = IDS[:, :length].contiguous()
        assert_same(step(graphed, ids), step(eager, ids))
    assert replays(graphed) == 3 * LAYERS  # the third and fourth of 10, the third of 7
    assert "6 calls of layers ran eagerly: shapes that had not recurred yet" in str(report)


def test_the_shapes_used_least_recently_go() -> None:
    graphed, eager = model().to(DEVICE), model().to(DEVICE)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, {**ON, "graph_shapes": 1, "graph_after": 1})
    for ids, expected in ((IDS, 0), (IDS, 1), (OTHER, 1), (OTHER, 2), (IDS, 2), (IDS, 3), (IDS, 4)):
        assert_same(step(graphed, ids), step(eager, ids))
        assert replays(graphed) == expected * LAYERS


class TestGradients:
    def test_accumulate_over_micro_batches(self) -> None:
        graphed, eager, _ = twins()
        for _ in range(3):
            for micro in range(4):
                assert_same(step(graphed, zero=not micro), step(eager, zero=not micro))
        assert replays(graphed) == 10 * LAYERS

    def test_that_are_kept_or_changed_stay_the_callers(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        step(graphed)
        kept = {name: p.grad for name, p in graphed.named_parameters() if p.grad is not None}
        values = {name: grad.clone() for name, grad in kept.items()}
        graphed.zero_grad()
        torch.nn.utils.clip_grad_norm_(graphed.parameters(), 1e-3)
        step(graphed, IDS.flip(0))
        assert all(torch.equal(kept[name], values[name]) for name in kept)
        for grad in kept.values():
            grad.zero_()
        assert_same(step(graphed), step(eager))

    def test_of_two_backwards_through_one_graph(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            loss = one(input_ids=IDS, labels=IDS).loss
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        assert all(map(torch.equal, *grads))
        train(graphed, eager, 2)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_of_two_forwards_before_a_backward(self, order: tuple[int, int]) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            losses = [one(input_ids=ids, labels=ids).loss for ids in (IDS, OTHER)]
            for index in order:
                losses[index].backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
        assert "the backward of an earlier call is still to come" in str(report)
        train(graphed, eager, 2)

    def test_of_the_recorded_forward_whose_backward_comes_late(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 2)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            losses = [one(input_ids=IDS, labels=IDS).loss for _ in range(2)]  # the first is recorded
            losses[1].backward()
            losses[0].backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
        train(graphed, eager, 4)

    def test_of_a_part_of_the_model(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            loss = one(input_ids=IDS, labels=IDS).loss
            last = layer(one, f"layers.{LAYERS - 1}.mlp.down_proj").lora_B["default"].weight
            grads.append(torch.autograd.grad(loss, last)[0])
            del loss
        assert torch.equal(*grads)
        train(graphed, eager, 2)


def add(one: PeftModel) -> None:
    torch.manual_seed(1)
    one.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    one.to(DEVICE)
    one.set_adapter("other")


def q(one: nn.Module) -> Any:
    return layer(one, "layers.1.self_attn.q_proj")


def new_weight(one: nn.Module) -> None:
    q(one).base_layer.weight.data = q(one).base_layer.weight.data * 2


def new_stock_weight(one: nn.Module) -> None:
    norm = layer(one, "layers.1.input_layernorm")
    norm.weight = nn.Parameter(norm.weight.detach() * 2)


def twice(one: nn.Module) -> None:
    q(one).register_forward_hook(lambda module, args, output: output * 2)


def twice_in_backward(one: nn.Module) -> None:
    q(one).lora_B["default"].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2,))


def scale(one: nn.Module) -> None:
    q(one).scaling["default"] = 3.0


def freeze(one: nn.Module) -> None:
    q(one).lora_A["default"].weight.requires_grad_(False)


def thaw(one: nn.Module) -> None:
    layer(one, "layers.1.input_layernorm").weight.requires_grad_(True)


def double_precision_norm(one: nn.Module) -> None:
    layer(one, "layers.0.input_layernorm").to(torch.bfloat16)


def other_attention_scaling(one: nn.Module) -> None:
    layer(one, "layers.1.self_attn").scaling = 0.9


CHANGES: dict[str, Callable[[Any], object]] = {
    "set_adapter": add,
    "scaling": scale,
    "weight data": new_weight,
    "norm weight": new_stock_weight,
    "forward hook": twice,
    "backward hook": twice_in_backward,
    "frozen": freeze,
    "trained": thaw,
    "eval": lambda one: one.eval(),
    "dtype of a norm": double_precision_norm,
    "attribute": other_attention_scaling,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_is_noticed(name: str) -> None:
    graphed, eager, _ = twins(lora_dropout=0.2)
    train(graphed, eager, 4)
    for one in (graphed, eager):
        CHANGES[name](one)
    before = replays(graphed)
    assert_same(step(graphed), step(eager))
    assert replays(graphed) == before
    train(graphed, eager, 4)


def test_adapters_that_are_disabled_for_a_call() -> None:
    graphed, eager, _ = twins()
    for _ in range(4):
        train(graphed, eager, 1)
        logits = []
        for one in (graphed, eager):
            with one.disable_adapter(), torch.no_grad():
                logits.append(one(input_ids=IDS).logits.clone())
        assert torch.equal(*logits)


def test_adapters_that_are_merged_for_an_evaluation() -> None:
    graphed, eager, _ = twins()
    for _ in range(4):
        train(graphed, eager, 1)
        for change in ("merge_adapter", "unmerge_adapter"):
            logits = []
            for one in (graphed, eager):
                getattr(one, change)()
                with torch.no_grad():
                    logits.append(one(input_ids=IDS).logits.clone())
            assert torch.equal(*logits)


def test_an_evaluation_between_two_steps() -> None:
    graphed, eager, _ = twins(lora_dropout=0.2)
    for _ in range(5):
        train(graphed, eager, 1)
        outputs = []
        for one in (graphed, eager):
            one.eval()
            with torch.no_grad():
                outputs.append(one(input_ids=OTHER).logits.clone())
            one.train()
        assert torch.equal(*outputs)


def test_a_step_builds_no_key_value_cache_unless_it_is_asked_for() -> None:
    graphed, eager, _ = twins()
    graphed.config.use_cache = eager.config.use_cache = True
    train(graphed, eager, 4)
    assert replays(graphed) == 2 * LAYERS
    assert graphed(input_ids=IDS, labels=IDS).past_key_values is None
    assert graphed(input_ids=IDS, labels=IDS, use_cache=True).past_key_values is not None
    with torch.no_grad():
        assert graphed(input_ids=IDS).past_key_values is not None
    assert any("Cache" in reason for reason in state_of(graphed).reasons)


def test_evaluations_without_gradients_are_replayed() -> None:
    graphed, eager, _ = twins()
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(graphed(input_ids=IDS).logits, eager(input_ids=IDS).logits)
    assert replays(graphed) == 2 * LAYERS


def test_an_output_is_the_callers_to_keep() -> None:
    graphed, _, _ = twins()
    with torch.no_grad():
        kept = [graphed(input_ids=IDS, output_hidden_states=True).hidden_states for _ in range(4)]
        values = [[state.clone() for state in states] for states in kept]
        graphed(input_ids=IDS.flip(0))
    assert all(torch.equal(a, b) for x, y in zip(kept, values, strict=True) for a, b in zip(x, y, strict=True))


def checkpointed(reentrant: bool, **config: Any) -> tuple[PeftModel, PeftModel, Report]:
    """As ``twins``, with checkpointing."""
    graphed, eager, report = twins(**config)
    for one in (graphed, eager):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return graphed, eager, report


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_steps_are_equal_to_the_bit(reentrant: bool, dropout: float, autocast: bool) -> None:
    graphed, eager, report = checkpointed(reentrant, lora_dropout=dropout)
    train(graphed, eager, 5, autocast=autocast)
    assert replays(graphed) == 3 * 2 * LAYERS
    # In the two eager steps torch ends a recompute that is not reentrant before down_proj.
    calls = {site.calls.served for site in report.fused if site.op == "lora"}
    assert calls == ({5 * 2} if reentrant else {5 * 2, 5 * 2 - 2})
    assert f"graphs: {LAYERS} layers recorded for 1 shape," in str(report)


def test_positions_of_packed_sequences() -> None:
    """Without a cache transformers would keep packed sequences apart, and with one it does not."""
    graphed, eager, _ = twins()
    for one in (graphed, eager):
        one.config.use_cache = True
    positions = torch.cat([torch.arange(4), torch.arange(6)]).expand(3, 10)
    train(graphed, eager, 4, position_ids=positions)


def test_calls_from_another_thread() -> None:
    graphed, eager, report = twins()
    train(graphed, eager, 4)
    before = replays(graphed)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with on_device():
                train(graphed, eager, 4)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    train(graphed, eager, 2)
    assert replays(graphed) == before
    assert "several threads call the model" in str(report)


def test_outputs_that_transformers_collects_inside_a_layer() -> None:
    """It puts hooks on a layer's parts when a call first asks for them."""
    graphed, eager, _ = twins()
    for one in (graphed, eager):
        one.base_model.model.set_attn_implementation("eager")
    train(graphed, eager, 4)
    assert replays(graphed) == 2 * LAYERS
    for options in ({"output_attentions": True}, {"output_hidden_states": True}):
        ours, theirs = (one(input_ids=IDS, labels=IDS, **options) for one in (graphed, eager))
        for name in ("attentions", "hidden_states"):
            pairs = list(zip(ours.get(name) or (), theirs.get(name) or (), strict=True))
            assert len(pairs) == (0 if f"output_{name}" not in options else LAYERS + (name == "hidden_states"))
            assert all(torch.equal(*pair) for pair in pairs)
    train(graphed, eager, 4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_micro_batches(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for _ in range(4):
        for ids, zero in ((IDS, True), (OTHER, False), (IDS.flip(0), False)):
            assert_same(step(graphed, ids, zero), step(eager, ids, zero))
    assert replays(graphed) > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_checkpointed_calls_before_one_backward(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for other in (IDS.flip(0), OTHER):
        for _ in range(4):
            outcomes = []
            for one in (graphed, eager):
                one.zero_grad()
                torch.manual_seed(3)
                loss = one(input_ids=IDS, labels=IDS).loss - 0.3 * one(input_ids=other, labels=other).loss
                loss.backward()
                grads = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
                outcomes.append((loss.detach(), grads, generator()))
            assert_same(*outcomes)
    assert replays(graphed) > 0


def test_a_checkpointed_call_whose_recordings_are_gone_when_its_backward_comes() -> None:
    graphed, eager, _ = checkpointed(False, lora_dropout=0.2)
    train(graphed, eager, 4)
    outcomes = []
    for one in (graphed, eager):
        one.zero_grad()
        torch.manual_seed(3)
        loss = one(input_ids=IDS, labels=IDS).loss
        one.train()
        state_of(graphed).sessions.clear()
        state_of(graphed)._latest = None
        after = generator()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
        outcomes.append((loss.detach(), grads, after))
    assert_same(*outcomes)


def test_a_checkpointed_model_that_changes_before_its_backward() -> None:
    graphed, eager, _ = checkpointed(False)
    train(graphed, eager, 4)
    for one in (graphed, eager):
        one.zero_grad()
        loss = one(input_ids=IDS, labels=IDS).loss
        layer(one, "layers.0.self_attn").attention_dropout = 0.0  # a new value, and the same number
        loss.backward()
    grads = [{n: p.grad for n, p in one.named_parameters() if p.grad is not None} for one in (graphed, eager)]
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_of_which_some_are_checkpointed(reentrant: bool) -> None:
    graphed, eager, _ = checkpointed(reentrant, lora_dropout=0.2)
    for one in (graphed, eager):
        layer(one, "layers.1").gradient_checkpointing = False
    train(graphed, eager, 5)
    for one in (graphed, eager):
        layer(one, "layers.0").gradient_checkpointing = False
        layer(one, "layers.1").gradient_checkpointing = True
    train(graphed, eager, 5)
    assert replays(graphed) > 0


def test_another_checkpointing_function_is_called() -> None:
    graphed, eager, _ = checkpointed(False)
    called = []

    def custom(function: Callable[..., Any], *args: Any) -> Any:
        called.append(function)
        return checkpoint(function, *args, use_reentrant=False)

    for one in (graphed, eager):
        for part in one.modules():
            if "_gradient_checkpointing_func" in part.__dict__:
                part._gradient_checkpointing_func = custom
    train(graphed, eager, 4)
    assert len(called) == 4 * LAYERS * 2


PADDED = {"graphs": "auto"}
LENGTHS = (70, 100, 120, 90, 128, 64, 65, 127, 30, 64, 33, 100, 128, 20)


def of_lengths(graphed: nn.Module, eager: nn.Module, batch: int) -> None:
    """Steps of varying lengths, equal to those of the eager model but for the order of sums in the products."""
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(0, 61, (batch, length), generator=torch.Generator(DEVICE).manual_seed(i), device=DEVICE)
        assert_equal(step(graphed, ids)[:2], step(eager, ids)[:2])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "not reentrant"])
def test_lengths_share_recordings(checkpointing: str, batch: int) -> None:
    graphed = model().to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, PADDED)
    if checkpointing != "off":
        for one in (graphed, eager):
            one.enable_input_require_grads()
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    of_lengths(graphed, eager, batch)
    assert len(state_of(graphed).sessions) == 2
    eager_calls = {reason: n for reason, n in state_of(graphed).reasons.items() if "checkpointing" not in reason}
    assert eager_calls.keys() == {"shapes that had not recurred yet"}
    assert replays(graphed) == (len(LENGTHS) - sum(eager_calls.values())) * LAYERS * (
        1 if checkpointing == "off" else 2
    )


def units(unit: type[nn.Module], *arguments: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, nn.Module]:
    """A patched model of two units with graphs, and its equal without; ``arguments`` make one more for each unit."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([unit(), unit()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more = [(make(x),) for make in arguments] or [(), ()]
            for each, argument in zip(self.layers, more, strict=True):
                x = each(x, *argument)
            return x

    for kind in (unit, Model):
        kind.forward.__module__ = "transformers.models.unit"  # a framework's code changes no model inside a call
    eager = Model()
    graphed = copy.deepcopy(eager)
    slothplug.patch(eager, {**OFF, "ops": ["rms_norm"]})
    slothplug.patch(graphed, {**PADDED, "ops": ["rms_norm"]})
    return graphed, eager


def test_units_with_other_arguments_of_the_same_shape() -> None:
    """As layers of local and of global attention get other rotary tables."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * scale

    graphed, eager = units(Unit, torch.ones_like, lambda x: torch.full_like(x, 3.0))
    for _ in range(5):
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            x = torch.linspace(-1, 2, 96).view(2, 3, 16).requires_grad_()
            (one(x) ** 3).sum().backward()
            grads.append([x.grad, *(p.grad.clone() for p in one.parameters() if p.grad is not None)])
        assert all(map(torch.equal, *grads))
    assert replays(graphed) == 3 * 2


def test_arguments_that_are_expanded_or_lie_in_a_dictionary() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.norm(x) * scales["one"] + scales["other"]

    def scales(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": torch.arange(3.0)[:, None].expand(x.shape), "other": torch.ones(16).expand(x.shape)}

    graphed, eager = units(Unit, scales, scales)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert replays(graphed) == 3 * 2


def test_a_unit_that_writes_into_its_buffers_runs_eagerly() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.mean(dim=(0, 1))
            return self.norm(x) + self.seen

    graphed, eager = units(Unit)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert state_of(graphed).reasons["cannot be recorded: RuntimeError: it writes into its buffers"] == 3 * 2


def test_a_unit_that_keeps_what_it_computed_runs_eagerly() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.before: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.before = self.before, self.norm(x)
            return self.before if before is None else self.before - before

    graphed, eager = units(Unit)
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(2, 3, 16)
            assert torch.equal(graphed(x), eager(x))
    assert replays(graphed) == 0
    assert any("sets attributes" in reason for reason in state_of(graphed).reasons)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_unit_that_draws_random_numbers_on_the_host_runs_eagerly(draw: Callable[[], float]) -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * draw()

    graphed, eager = units(Unit)
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(2, 3, 16)
            outputs = []
            for one in (graphed, eager):
                random.seed(seed)
                np.random.seed(seed)
                outputs.append(one(x))
            assert torch.equal(*outputs)
    assert any("random numbers from Python or NumPy" in reason for reason in state_of(graphed).reasons)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has only one way to allow TF32")
def test_both_ways_to_allow_tf32_at_once() -> None:
    graphed, eager, _ = twins()
    train(graphed, eager, 3)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="mix"):
            torch.get_float32_matmul_precision()
        train(graphed, eager, 1)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")


def test_a_unit_that_reads_later_positions_is_recorded_for_its_own_lengths() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + x.mean(dim=1, keepdim=True)

    graphed, eager = units(Unit)
    for length in (10, 12, 10, 12, 10, 12, 11, 10, 12):
        x = torch.randn(2, length, 16)
        assert torch.equal(graphed(x), eager(x))
    assert any("depends on what follows" in reason for reason in state_of(graphed).reasons)


def test_dropout_keeps_each_length_to_itself() -> None:
    graphed = model(lora_dropout=0.2).to(DEVICE)
    eager = copy.deepcopy(graphed)
    slothplug.patch(eager, OFF)
    slothplug.patch(graphed, PADDED)
    for ids in (IDS, OTHER, IDS, OTHER, IDS, OTHER, IDS, OTHER, IDS, OTHER):
        assert_same(step(graphed, ids), step(eager, ids))
    assert replays(graphed) > 0


class Fails(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    """A recorder on whose device nothing can be recorded."""

    def record(self, function: Callable[[], None]) -> Any:
        torch.rand(3)
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_recorded_runs_eagerly_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", Fails)
    graphed, eager, _ = twins(lora_dropout=0.3)
    train(graphed, eager, 6)
    assert replays(graphed) == 0
    reason = "cannot be recorded: RuntimeError: operation not permitted when stream is capturing"
    assert state_of(graphed).reasons[reason] == 4 * LAYERS


class FailsBackward(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    def record(self, function: Callable[[], None]) -> Any:
        if function.__name__ == "_run_backward":
            raise RuntimeError("no backward")
        return super().record(function)


class Full(CudaRecorder if DEVICE == "cuda" else RunsAgain):  # type: ignore[misc]
    """A recorder on a device without memory to spare."""

    def make_room(self, size: int) -> bool:
        return False


def test_nothing_is_recorded_where_the_memory_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", Full)
    graphed, eager, _ = twins()
    train(graphed, eager, 5)
    assert replays(graphed) == 0
    assert any("memory" in reason for reason in state_of(graphed).reasons)


@pytest.mark.parametrize("most_tokens", [15, 2048])
def test_a_longer_sequence_than_ever_finds_the_memory_of_the_recordings(
    most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slothplug.graphs.call._MOST_TOKENS", most_tokens)
    graphed, eager, _ = twins()
    short = IDS[:, :4].contiguous()
    for _ in range(4):
        assert_same(step(graphed, short), step(eager, short))
    assert replays(graphed) == 2 * LAYERS
    assert_same(step(graphed), step(eager))
    assert not state_of(graphed).sessions
    for _ in range(4):
        assert_same(step(graphed, short), step(eager, short))
    assert replays(graphed) == 4 * LAYERS


def test_a_unit_that_returns_something_else_than_tensors_runs_eagerly() -> None:
    class Output(dict):  # type: ignore[type-arg]
        pass

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> Output:
            return Output(x=self.norm(x))

    Unit.forward.__module__ = "transformers.models.unit"  # a framework's code, which changes no model inside a call

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Unit(), Unit()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for unit in self.layers:
                x = unit(x)["x"]
            return x

    Model.forward.__module__ = Unit.forward.__module__
    one = Model()
    slothplug.patch(one, {**ON, "ops": ["rms_norm"]})
    x = torch.randn(2, 3, 16)
    first = one(x)
    for _ in range(4):
        assert torch.equal(one(x), first)
    assert state_of(one).reasons["cannot be recorded: TypeError: its forward returns a Output"] == 3 * 2


def test_a_backward_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", FailsBackward)
    graphed, eager, report = twins()
    train(graphed, eager, 6)
    assert "its backward cannot be recorded: no backward" in str(report)


def test_a_backward_that_cannot_be_recorded_of_a_unit_that_draws_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slothplug.graphs.state.make_recorder", FailsBackward)
    graphed, eager, _ = twins(lora_dropout=0.3)
    train(graphed, eager, 2)
    with pytest.raises(RuntimeError, match=r"layers\.1, which draws .*\(no backward\).* graphs: off"):
        step(graphed)


class _Mode(torch.autograd.Function):
    """Demands that its backward is recorded where its forward was, as attention with dropout does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.recorded = _records()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        assert ctx.recorded == _records()
        return grad_output.clone()


def _records() -> bool:
    return torch.cuda.is_current_stream_capturing() if DEVICE == "cuda" else RunsAgain.records


def test_a_backward_runs_where_its_forward_did() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Mode.apply(self.norm(x))

    graphed, _ = units(Unit)
    for _ in range(5):
        graphed(torch.randn(2, 3, 16)).sum().backward()
    assert replays(graphed) == 3 * 2
    assert not [reason for reason in state_of(graphed).reasons if "recorded" in reason]


class TestLifecycle:
    def test_undo(self) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        report.undo()
        assert not any(is_patched(part) for part in graphed.modules())

    def test_of_a_with_block(self) -> None:
        one = model().to(DEVICE)
        with slothplug.fast_kernels(one, ON):
            for _ in range(4):
                step(one)
        assert not any(is_patched(part) for part in one.modules())

    def test_a_copy_records_for_itself(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        duplicate = copy.deepcopy(graphed)
        train(duplicate, graphed, 5)
        assert replays(duplicate) == 3 * LAYERS

    def test_a_pickle_holds_nothing_of_it(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        assert not any(is_patched(part) for part in pickle.loads(pickle.dumps(graphed)).modules())

    def test_a_deleted_models_memory_goes_with_its_last_reference(self) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        weight = weakref.ref(q(graphed).base_layer.weight)
        held = weakref.ref(state_of(graphed))
        gc.collect()
        gc.disable()
        try:
            del graphed
            assert weight() is None
            assert held() is None
        finally:
            gc.enable()
        assert "graphs" not in str(report)

    def test_patching_twice_changes_nothing(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        before = replays(graphed)
        again = slothplug.patch(graphed, ON)
        train(graphed, eager, 4)
        assert replays(graphed) > before
        assert f"graphs: {LAYERS} layers recorded for 1 shape," in str(again)

    def test_off(self) -> None:
        one = model().to(DEVICE)
        report = slothplug.patch(one, OFF)
        assert not any(isinstance(s := p.__dict__.get(STATE), Served) and s.op == "graphs" for p in one.modules())
        assert "graphs" not in str(report)


@pytest.mark.gpu
def test_steps_on_other_streams() -> None:
    graphed, eager, _ = twins()
    train(graphed, eager, 4)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in (*streams, *streams):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            train(graphed, eager, 1)
    assert replays(graphed) == 8 * LAYERS


@pytest.mark.gpu
def test_a_unit_that_waits_for_the_device_runs_eagerly_and_spoils_nothing() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(self.norm(x), 0.5) * (1.0 if x.sum().item() else 2.0)

    graphed, eager = units(Unit)
    x = torch.randn(2, 3, 16)
    for _ in range(5):
        outputs = []
        for one in (graphed, eager):
            torch.manual_seed(1)
            outputs.append(one(x))
        assert torch.equal(*outputs)
    assert replays(graphed) == 0
    assert any(reason.startswith("cannot be recorded") for reason in state_of(graphed).reasons)
    train(*twins(lora_dropout=0.2)[:2], 4)
