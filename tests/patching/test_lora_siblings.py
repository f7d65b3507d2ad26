"""LoRA layers that share an input: one node for all, and no output kept for or given to the wrong one."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from slothplug.ops.lora import siblings
from slothplug.patching.served import STATE
from tests.patching.device import DEVICE
from tests.patching.lora_models import IDS, PROJECTIONS, assert_equal, fallbacks, layer, pair, step


def test_siblings_share_one_node() -> None:
    fast, _, _ = pair()
    nodes: dict[str, object] = {}
    inside = [f"layers.0.self_attn.{name}" for name in PROJECTIONS[:4]] + [
        f"layers.0.mlp.{name}" for name in PROJECTIONS[4:]
    ]
    originals = {name: layer(fast, name).__dict__[STATE].calls for name in inside}
    for name, calls in originals.items():
        serve = type(calls).serve
        calls.serve = lambda y, name=name, calls=calls, serve=serve: (nodes.update({name: y.grad_fn}), serve(calls, y))[
            1
        ]
    step(fast)
    q, k, v, o, gate, up, down = (nodes[name] for name in inside)
    assert q is k is v
    assert gate is up
    assert len({id(node) for node in (q, o, gate, down)}) == 4


def by_group(members: dict[nn.Module, siblings.Member]) -> Iterator[tuple[siblings.Group, list[nn.Module]]]:
    key: Callable[[nn.Module], int] = lambda module: id(members[module].group)  # noqa: E731
    for _, modules in itertools.groupby(sorted(members, key=key), key=key):
        own = sorted(modules, key=lambda module: members[module].index)
        yield members[own[0]].group, own


def test_which_layers_are_siblings() -> None:
    class Parent(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Linear(4, 4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Parent("q_proj", "k_proj", "v_proj", "o_proj")
            self.encoder_attn = Parent("q_proj", "k_proj", "v_proj")
            self.bert = Parent("query", "key", "value", "dense")
            self.mlp = Parent("gate_proj", "up_proj", "down_proj")
            self.t5 = Parent("wi_0", "wi_1", "wo")
            self.expert = Parent("w1", "w2", "w3")
            self.lonely = Parent("q_proj", "o_proj")

    parent = Model()
    linears = {name: module for name, module in parent.named_modules() if isinstance(module, nn.Linear)}
    members = siblings.groups_in(linears, parent)
    names = {module: name for name, module in linears.items()}
    grouped = sorted(tuple(names[m] for m in group) for _, group in by_group(members))
    assert grouped == [
        ("bert.query", "bert.key", "bert.value"),
        ("expert.w1", "expert.w3"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("t5.wi_0", "t5.wi_1"),
    ]


def siblings_of(one: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    q, k, v = (layer(one, f"layers.0.self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj"))
    return q, k, v


def test_a_sibling_with_another_input_computes_by_itself() -> None:
    fast, stock, report = pair()
    (q, k, v), (q2, k2, v2) = siblings_of(fast), siblings_of(stock)
    x, other = torch.randn(2, 32, requires_grad=True), torch.randn(2, 32)
    torch.testing.assert_close(q(x), q2(x))
    torch.testing.assert_close(k(other), k2(other))
    torch.testing.assert_close(v(x), v2(x))
    assert fallbacks(report) == {siblings.ANOTHER_INPUT: 1}


def test_what_changed_between_two_siblings_is_seen() -> None:
    fast, stock, _ = pair()
    (q, k, v), (_, k2, v2) = siblings_of(fast), siblings_of(stock)
    x = torch.randn(2, 32)
    q(x)
    x.mul_(2)
    torch.testing.assert_close(k(x), k2(x))
    q(x)
    with torch.no_grad():
        for one in (v, v2):
            one.lora_B["default"].weight.mul_(3)
    torch.testing.assert_close(v(x), v2(x))
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad
    q(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert k(x).dtype is torch.bfloat16
    q(x)
    k.scale_layer(2.0)
    k2.scale_layer(2.0)
    torch.testing.assert_close(k(x), k2(x))


def test_an_output_is_not_collected_in_another_mode() -> None:
    fast, stock, _ = pair()
    (q, k, _), (_, k2, _) = siblings_of(fast), siblings_of(stock)
    x = torch.randn(2, 32)
    with torch.no_grad():
        q(x)
        with torch.inference_mode():
            assert k(x).is_inference()
            torch.testing.assert_close(k(x), k2(x))


def test_nothing_is_kept_past_the_call() -> None:
    fast, _, report = pair()
    k = siblings_of(fast)[1]
    k.forward = lambda x: nn.functional.linear(x, k.base_layer.weight)  # somebody's k_proj never collects
    assert_equal(step(fast), step(fast))
    assert siblings._local.round is None
    assert "hooks" not in str(fallbacks(report))

    class Gives(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    fast, _, report = pair()
    layer(fast, "layers.0.self_attn").k_proj = Gives()
    with pytest.raises(KeyboardInterrupt):
        fast(input_ids=IDS)
    assert siblings._local.round is None
    assert fallbacks(report) == {siblings.NOT_ASKED_FOR: 1}  # v_proj's; k_proj is gone


def test_outputs_kept_in_a_backward_pass_are_dropped_at_its_end() -> None:
    fast, _, report = pair()
    q, k, _ = siblings_of(fast)
    x = torch.randn(2, 32, requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        y = torch.utils.checkpoint.checkpoint(lambda x: q(x) + k(x)[:, :1], x, use_reentrant=False)
    siblings.clear()  # a part of the model called by itself has no end
    y.sum().backward()  # on a GPU it recomputes on another thread
    current = siblings._local.round
    assert current is None or not current.kept
    assert fallbacks(report)[siblings.NOT_ASKED_FOR] == 2  # v_proj's, of the forward and of the recompute


def test_replicas_of_data_parallel_compute_by_themselves() -> None:
    fast, stock, _ = pair()
    x = torch.randn(2, 32)
    (q, _, _), (q2, _, _) = siblings_of(fast), siblings_of(stock)
    replica = q._replicate_for_data_parallel()
    siblings.clear()  # layers that an earlier test called by themselves
    torch.testing.assert_close(replica(x), q2(x))
    assert siblings._local.round is None


def test_a_deep_copy_uses_its_own_weights_and_siblings() -> None:
    fast, stock, _ = pair()
    duplicate = copy.deepcopy(fast)
    stock_duplicate = copy.deepcopy(stock)
    for one in (duplicate, stock_duplicate):
        with torch.no_grad():
            for parameter in one.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
    assert_equal(step(duplicate), step(stock_duplicate))
    assert_equal(step(fast), step(stock))
    for one in (fast, duplicate):
        names = ("q_proj", "k_proj", "v_proj")
        own = [layer(one, f"layers.0.self_attn.{name}") for name in names]
        group = own[0].__dict__[STATE].spec.member.group
        assert all(module.__dict__[STATE].spec.member.group is group for module in own)
        assert [reference() for reference in group.modules] == own


def test_a_single_layer_can_be_copied_and_freed() -> None:
    fast, _, _ = pair()
    single = copy.deepcopy(layer(fast, "layers.0.self_attn.q_proj"))
    x = torch.randn(2, 32)
    torch.testing.assert_close(single(x), layer(fast, "layers.0.self_attn.q_proj")(x))
    freed = weakref.ref(single)
    del single
    gc.collect()
    assert freed() is None
