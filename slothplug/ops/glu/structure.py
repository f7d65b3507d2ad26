"""Gated MLPs by their children: which linear layers can be gate, up and down, and twins that record their calls."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from slothplug.patching.fingerprint import fingerprint
from slothplug.patching.predicates import device_of
from slothplug.patching.private_class import stock_class
from slothplug.patching.twin import twin

# Widths of a twin's layers: all different, so that no layer can take another's place.
SMALL_HIDDEN, SMALL_INTERMEDIATE, SMALL_OUT = 8, 12, 10

# Three linear layers, an activation, dropouts or identities: more children are something else.
MOST_CHILDREN = 6


@dataclass(frozen=True)
class Shape:
    """The linear children of a candidate, or of its twin, by role, and their widths."""

    inner: tuple[str, ...]
    """Names of the layers that read the input: gate and up, or the packed one."""
    down: str
    hidden: int
    intermediate: int
    out: int

    def shrunk(self) -> Shape:
        return replace(self, hidden=SMALL_HIDDEN, intermediate=SMALL_INTERMEDIATE, out=SMALL_OUT)

    def elements(self) -> int:
        return self.intermediate * (2 * self.hidden + self.out)


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children by name, one that is there twice under both names."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def shapes_of(module: nn.Module) -> list[Shape]:
    """The ways in which the linear children can be gate, up and down; empty where the module is no candidate."""
    if module._parameters or module._buffers or not 2 <= len(module._modules) <= MOST_CHILDREN:
        return []
    widths: dict[str, tuple[int, int]] = {}
    for name, child in children_of(module):
        if size := _widths(child):
            widths[name] = size
        elif child._parameters or child._buffers or child._modules:
            return []
    shapes = []
    for down, (intermediate, out) in widths.items():
        inner = tuple(name for name in widths if name != down)
        if len(inner) not in (1, 2):
            return []
        hidden = widths[inner[0]][0]
        wanted = intermediate if len(inner) == 2 else 2 * intermediate
        if all(widths[name] == (hidden, wanted) for name in inner):
            shapes.append(Shape(inner, down, hidden, intermediate, out))
    return shapes


def _widths(child: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear-like layer; transformers' Conv1D calls them nx and nf."""
    for inward, outward in (("in_features", "out_features"), ("nx", "nf")):
        size = getattr(child, inward, None), getattr(child, outward, None)
        if isinstance(size[0], int) and isinstance(size[1], int):
            return size[0], size[1]
    return None


def _has_bias(child: nn.Module) -> bool:
    return getattr(child, "bias", None) is not None


def weight_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The floating dtypes of the linear children's weights; packed integers of quantised ones do not count."""
    weights = (getattr(child, "weight", None) for child in module._modules.values())
    return {weight.dtype for weight in weights if isinstance(weight, torch.Tensor) and weight.is_floating_point()}


def key_of(module: nn.Module) -> Hashable:
    """Modules of equal keys compute the same: class, children's kinds, and every attribute, by value or by identity."""
    children = tuple(
        (name, stock_class(child), _widths(child) or fingerprint(child), _has_bias(child))
        for name, child in children_of(module)
    )
    return stock_class(module), children, fingerprint(module)


@dataclass
class Called:
    """A call of one of a twin's linear layers."""

    name: str
    input: torch.Tensor
    output: torch.Tensor


class _RecordingLinear(nn.Linear):
    """A twin's linear layer, which writes down its calls."""

    name: str
    calls: list[Called]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        self.calls.append(Called(self.name, input, output))
        return output


def recording_twin(
    module: nn.Module, shape: Shape, training: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, list[Called]]:
    """A twin of the module whose linear layers record and have the widths of ``shape``; other children are copied."""
    calls: list[Called] = []
    factor = 2 if len(shape.inner) == 1 else 1
    widths = {
        **dict.fromkeys(shape.inner, (shape.hidden, factor * shape.intermediate)),
        shape.down: (shape.intermediate, shape.out),
    }
    children: dict[str, nn.Module] = {}
    for name, child in children_of(module):
        if name in widths:
            linear = _RecordingLinear(*widths[name], bias=_has_bias(child), device=device_of(module), dtype=dtype)
            linear.name, linear.calls = name, calls
            children[name] = linear
        else:
            children[name] = copy.deepcopy(child).train(training)
    double = twin(module, dtype, children)
    double.training = training
    return double, calls
