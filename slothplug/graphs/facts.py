"""What a unit's recordings depend on beside its call: all of it is noted, so that the model's binding holds it too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.patching.fingerprint import attributes_of
from slothplug.patching.predicates import plain
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import Watch

_STATELESS = (
    nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
"""Modules whose kernels depend on their parameters and children alone."""


class Trained(NamedTuple):
    """A parameter of a unit that requires grad, by the dictionary of its module and its name."""

    parameters: dict[str, Any]
    name: str

    def now(self) -> nn.Parameter:
        parameter: nn.Parameter = self.parameters[self.name]
        return parameter


class UnitFacts(NamedTuple):
    """What a unit's recordings share, for as long as the model's binding holds.

    Attributes:
        trained: its parameters that require grad.
        draws: by grad mode, whether its forward draws random numbers of the device; filled when it is rehearsed.
    """

    trained: tuple[Trained, ...]
    draws: dict[bool, bool]


def bind(unit: nn.Module, served: Served[None, Any], watch: Watch) -> UnitFacts | Refusal:
    """The trained parameters, for as long as nothing in the unit changes that its kernels depend on."""
    trained: list[Trained] = []
    inside: set[nn.Module] = set()
    """Parts of a module that is served as a whole: its own facts note their parameters and classes."""
    for name, part in unit.named_modules():
        if part is not unit and not watch.unhooked(part):
            return Refusal(f"hooks on {name}")
        for parameters, key, tensor in _tensors(part):
            if refusal := _why_not_tensor(f"{name}.{key}", tensor):
                return refusal
            if part not in inside:
                watch.tensor(watch.item(parameters, key))
            if watch.trained(tensor):
                trained.append(Trained(parameters, key))
        if part is unit or not _is_leaf(part):
            _watch_attributes(part, watch, whole=part not in inside)
        else:
            inside.update(part.modules())
            _watch_switches(part, watch)
    return UnitFacts(tuple(trained), {})


def _tensors(part: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for tensors in (part._parameters, part._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield tensors, name, tensor


def _why_not_tensor(name: str, tensor: torch.Tensor) -> Refusal | None:
    if hasattr(tensor, "ds_id") or not (plain(tensor) or type(tensor).__module__.startswith("bitsandbytes.")):
        return Refusal(f"its {name} is sharded, or a {type(tensor).__name__}")
    return None


def _is_leaf(part: nn.Module) -> bool:
    """Whether a part is served, and nothing inside it is."""
    states = [isinstance(inner.__dict__.get(STATE), Served) for inner in part.modules()]
    return states[0] and not any(states[1:])


def _watch_switches(part: nn.Module, watch: Watch) -> None:
    """What a served module asks on every call instead of binding it: switches, and lists of what is switched on."""
    for name, value in attributes_of(part):
        if type(value) is bool and name != "training":
            watch.item(part.__dict__, name)
        elif type(value) is list:
            watch.size(watch.item(part.__dict__, name))


def _watch_attributes(part: nn.Module, watch: Watch, whole: bool) -> None:
    """Every attribute, by identity; of a configuration what it holds. Not ``whole``: attributes that may be added."""
    if stock_class(part) in _STATELESS:
        return
    own = part.__dict__
    if whole:
        watch.size(own)
        watch.size(part._parameters)
        watch.empty(part._buffers)
    for name, value in attributes_of(part):
        watch.item(own, name)
        if type(value) in (list, dict):
            watch.size(value)
        elif hasattr(value, "to_dict") and hasattr(value, "__dict__"):  # a configuration
            watch.items(repeat(vars(value)), vars(value))
