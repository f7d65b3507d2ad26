"""Steps whose layers are replayed equal eager patched steps to the bit."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import slothplug
from tests.graphs.steps import OFF, ON, OTHER, replays, state_of, train, twins
from tests.patching.conftest import on_device
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, LAYERS, model


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
