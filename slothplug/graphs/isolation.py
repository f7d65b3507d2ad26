"""Contexts in which a unit is recorded, so that the recording reaches nothing outside of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
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
def nothing_left_behind(module: nn.Module, device: torch.device) -> Iterator[None]:
    """For recording, which may run a unit once more than it was called, and whose replays run no Python.

    Raises:
        RuntimeError: the unit sets attributes, which would be memory of the recording, writes into its buffers, or
            draws random numbers that are not the device's. All are as they were before.
    """
    with _host_generators(device), _attributes(module), _buffers(module):
        yield


@contextlib.contextmanager
def _attributes(module: nn.Module) -> Iterator[None]:
    places = [place for part in module.modules() for place in (part.__dict__, part._buffers)]
    before = [(place, dict(place)) for place in places]
    changed = False
    try:
        yield
    finally:
        for now, then in before:
            if now.keys() != then.keys() or any(now[name] is not then[name] for name in then):
                changed = True
                now.clear()
                now.update(then)
    if changed:
        raise RuntimeError("it sets attributes of its modules")


@contextlib.contextmanager
def _buffers(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers() if not buffer.is_inference()]
    changed = False
    try:
        yield
    finally:
        for buffer, version, value in before:
            if buffer._version != version:
                changed = True
                with torch.no_grad():
                    buffer.copy_(value)
    if changed:
        raise RuntimeError("it writes into its buffers")


@contextlib.contextmanager
def _host_generators(device: torch.device) -> Iterator[None]:
    """Of Python, NumPy, and the CPU where that is not the unit's device."""
    cpu = torch.get_rng_state() if device.type != "cpu" else None
    python, numpy = random.getstate(), np.random.get_state()
    yield
    if random.getstate() != python or not all(map(np.array_equal, np.random.get_state(), numpy)):
        random.setstate(python)
        np.random.set_state(numpy)
        raise RuntimeError("it draws random numbers from Python or NumPy")
    if cpu is not None and not torch.equal(cpu, torch.get_rng_state()):
        torch.set_rng_state(cpu)
        raise RuntimeError("it draws random numbers on the CPU")


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """A weight's cast that a recording makes is memory of the recording, which later operations must not find."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
