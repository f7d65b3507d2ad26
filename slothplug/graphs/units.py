"""Units: the repeated parts of a model whose children are served."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from slothplug.patching.served import STATE, Served


def find_units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The elements of every outermost ``nn.ModuleList`` that have served modules inside, with their qualified names."""
    inside: set[nn.Module] = set()
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList) or container in inside:
            continue
        units = [(f"{name}.{index}", unit) for index, unit in container.named_children() if _has_served(unit)]
        if len(units) < 2:
            continue
        for _, unit in units:
            inside.update(unit.modules())
        yield from units


def _has_served(unit: nn.Module) -> bool:
    return any(isinstance(part.__dict__.get(STATE), Served) for part in unit.modules() if part is not unit)
