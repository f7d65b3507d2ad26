"""Twins and probes: they reach nothing of the original, and what they showed is heeded for as long as it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import slothplug
from slothplug.ops.rotary.recognition import identify
from slothplug.patching.fingerprint import fingerprint
from slothplug.patching.precision import preserved_rng
from slothplug.patching.served import STATE, Calls
from slothplug.patching.settled import Settled
from slothplug.patching.twin import twin


class MLP(nn.Module):
    def __init__(self, act: nn.Module | None = None, function: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = act or function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def fuse(mlp: nn.Module, **settings: Any) -> slothplug.Report:
    return slothplug.patch(nn.Sequential(mlp), {"ops": ["glu"], "backend": "torch", **settings})


def calls(module: nn.Module) -> Calls:
    found: Calls = module.__dict__[STATE].calls
    return found


def make_approximate(mlp: Any) -> None:
    mlp.act.approximate = "tanh"


def replace_activation(mlp: Any) -> None:
    mlp.act = nn.Tanh()


def replace_forward_of_activation(mlp: Any) -> None:
    mlp.act.forward = torch.tanh


@pytest.mark.parametrize("change", [make_approximate, replace_activation, replace_forward_of_activation])
def test_an_activation_changed_after_the_patch_is_heeded(change: Callable[[Any], None]) -> None:
    mlp = MLP(nn.GELU())
    stock = copy.deepcopy(mlp)
    fuse(mlp)
    x = torch.randn(2, 5, 16)
    mlp(x)
    assert calls(mlp).served == 1
    change(mlp)
    change(stock)
    assert torch.equal(mlp(x), stock(x))
    assert calls(mlp).served == 1
    assert sum(calls(mlp).fallbacks.values()) == 1


def test_an_activation_function_changed_after_the_patch_is_heeded() -> None:
    mlp = MLP(function=functional.silu)
    stock = copy.deepcopy(mlp)
    fuse(mlp)
    mlp.act = stock.act = torch.tanh
    x = torch.randn(2, 5, 16)
    assert torch.equal(mlp(x), stock(x))
    assert calls(mlp).served == 0


def test_copies_and_layers_with_equal_lists_are_served() -> None:
    mlps = MLP(nn.GELU()), MLP(nn.GELU())
    for mlp in mlps:
        mlp.sizes = [16, 24]
    model = nn.Sequential(*mlps)
    slothplug.patch(model, {"ops": ["glu"], "backend": "torch"})
    double = copy.deepcopy(model)
    double(torch.randn(2, 5, 16))
    for mlp in double:
        assert calls(mlp).served == 1
        assert not calls(mlp).fallbacks


def replaced_forward(mlp: Any) -> None:
    original = mlp.forward
    mlp.forward = lambda x: original(x) + 1


def test_a_gated_mlp_whose_forward_was_replaced_is_left_with_that_reason() -> None:
    mlp = MLP(nn.SiLU())
    replaced_forward(mlp)
    with pytest.warns(slothplug.NothingFusedWarning):
        report = fuse(mlp)
    assert [(site.op, site.reason) for site in report.left] == [
        ("glu", "its forward was replaced on the instance by somebody else")
    ]
    with pytest.raises(slothplug.NothingFusedError, match="replaced on the instance"):
        fuse(mlp, strict=True)


def test_a_twin_calls_nothing_of_the_original() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.scale = self.scaled

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x)

    module = Bound()
    replaced_forward(module)
    double = twin(module, torch.float32)
    assert torch.equal(double(torch.ones(4)), double.weight)


def test_fingerprints_tell_values_from_their_likes_and_objects_by_identity() -> None:
    def of(value: object) -> object:
        module = nn.Module()
        module.value = value
        return fingerprint(module)

    shared = nn.Module
    assert of(1) == of(1)
    assert of([1, {"a": 2}]) == of([1, {"a": 2}])
    assert of(shared) == of(shared)
    config = {1, 2}
    assert of(config) == of(config)
    for other in (True, 1.0, "1", [1], {1, 2}):
        assert of(1) != of(other)
    assert of({1, 2}) != of(config)
    module = nn.Module()
    module.value, module.free = 1, 1
    settled = Settled.of(module, "free")
    assert isinstance(settled, Settled)
    module.free, module.later = 2, 3
    assert settled.fits(module)
    module.value = True
    assert not settled.fits(module)


@pytest.mark.parametrize("what", ["identify", "patch"])
def test_every_gpu_is_seeded_only_where_every_gpu_is_restored(
    what: str, monkeypatch: pytest.MonkeyPatch, tiny_llama: Callable[..., nn.Module]
) -> None:
    forked: list[tuple[int, ...]] = []
    seeded: list[bool] = []

    @contextmanager
    def fork_rng(devices: Iterable[int], *_: object, **__: object) -> Iterator[None]:
        forked.append(tuple(devices))
        yield
        forked.pop()

    model = tiny_llama()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda _: seeded.append(bool(forked) and forked[-1] == (0, 1, 2))
    )
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    if what == "identify":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        identify.__wrapped__(apply_rotary_pos_emb)
    else:
        monkeypatch.setattr("slothplug.patching.verdicts._verdicts", {})
        slothplug.patch(model, {"backend": "torch"})
    assert seeded
    assert all(seeded)


def test_gpus_that_are_not_in_use_get_no_order_to_seed_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with preserved_rng():
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded
