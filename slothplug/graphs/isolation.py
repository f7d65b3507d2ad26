"""Contexts in which a unit is recorded, so that the recording reaches nothing outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from slothplug.graphs.facts import Trained
from slothplug.patching.served import STATE, Served


@contextlib.contextmanager
def aliased(trained: Sequence[Trained]) -> Iterator[list[nn.Parameter]]:
    """Gives the unit aliases of its parameters, which have autograd nodes of their own.

    The node that accumulates a parameter's gradient belongs to the stream on which the parameter was first used, and a
    recording must not wait for another stream.
    """
    originals = [each.now() for each in trained]
    aliases = [nn.Parameter(parameter.detach()) for parameter in originals]
    try:
        for each, alias in zip(trained, aliases, strict=True):
            each.parameters[each.name] = alias
        yield aliases
    finally:
        for each, original in zip(trained, originals, strict=True):
            each.parameters[each.name] = original


@contextlib.contextmanager
def uncounted(module: nn.Module) -> Iterator[list[tuple[Any, int, int]]]:
    """Yields a list that is filled with the calls of served modules inside, which are not counted themselves."""
    states = [part.__dict__.get(STATE) for part in module.modules() if part is not module]
    before = [(s.calls, s.calls.served, s.calls.collected) for s in states if isinstance(s, Served)]
    counted: list[tuple[Any, int, int]] = []
    try:
        yield counted
    finally:
        for calls, served, collected in before:
            counted.append((calls, calls.served - served, calls.collected - collected))
            calls.served, calls.collected = served, collected


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """A weight's cast that a recording makes is memory of the recording, which later operations must not find."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
