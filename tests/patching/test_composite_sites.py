"""A site that computes the work of served modules inside it: they count as used, and are there when it falls back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.patching.private_class import is_patched
from slothplug.patching.served import Served
from slothplug.patching.sites import Kernel, Operation, Refusal, Site

X = torch.ones(2, 4)


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Factor(), Factor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def fast_factor(module: Any, served: Served[None, None], x: torch.Tensor) -> torch.Tensor:
    return served.calls.serve(x * module.weight)


def fast_pair(module: Any, served: Served[None, None], x: torch.Tensor) -> torch.Tensor:
    if x.ndim != 2:
        return served.fall_back(module, Refusal(f"input of {x.ndim} dimensions"), x)
    return served.calls.serve(x * module.first.weight * module.second.weight)


class Plugin:
    @hookimpl
    def slothplug_operations(self) -> list[Operation]:
        return [Operation("factor", "for a test"), Operation("pair", "for a test")]

    @hookimpl
    def slothplug_find_sites(self, model: nn.Module) -> Iterator[Site[None]]:
        kernel = Kernel("product", "torch", torch.mul)
        for name, module in model.named_modules():
            if isinstance(module, Factor):
                yield Site("factor", name, module, fast_factor, None, kernel, lambda: None, "factor")
            if isinstance(module, Pair):
                inside = [module.first, module.second]
                yield Site("pair", name, module, fast_pair, None, kernel, lambda: None, "pair", subsumes=inside)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    plugin = Plugin()
    slothplug.plugin_manager().register(plugin)
    yield nn.Sequential(Pair(), Pair())
    slothplug.plugin_manager().unregister(plugin)


def test_what_it_subsumes_is_not_idle_while_it_serves(model: nn.Module) -> None:
    report = slothplug.patch(model)
    assert set(report.idle()) >= {"factor", "pair"}
    assert torch.equal(model(X), X * 3**4)
    assert [site.calls.served for site in report.by_op()["factor"]] == [0] * 4
    assert [site.calls.served for site in report.by_op()["pair"]] == [1] * 2
    assert not {"factor", "pair"} & set(report.idle())


def test_what_it_subsumes_serves_the_calls_that_fall_back(model: nn.Module) -> None:
    report = slothplug.patch(model)
    x = X[None]
    assert torch.equal(model(x), x * 3**4)
    assert all(site.calls.served == 1 for site in report.by_op()["factor"])
    assert all(site.calls.fallbacks == {"input of 3 dimensions": 1} for site in report.by_op()["pair"])


def test_undo_gives_all_of_them_back(model: nn.Module) -> None:
    report = slothplug.patch(model)
    assert all(map(is_patched, model.modules()))
    report.undo()
    assert not any(map(is_patched, model.modules()))
