"""Gated MLP sites: modules that compute ``down(act(gate(x)) * up(x))``, with gate and up apart or packed in one layer.

The operation ``glu`` is the product between the linear layers. A kernel that a plugin offers for it is called as

    kernel(gate, up, activation=...)                  gate, up: [..., I]             -> [..., I]
    kernel(gate_up, None, activation=..., layout=...) gate_up: [..., 2 I], packed    -> [..., I]

with ``activation`` one of ``kernels.glu.ACTIVATIONS`` and ``layout`` one of ``kernels.glu.LAYOUTS``; it is
differentiable in its tensors and returns their dtype. The linear layers are called as modules, in stock's order:
adapters, quantised layers, hooks and sharding stay theirs, and no weight is read here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slothplug.hookspecs import hookimpl
from slothplug.kernels.backend import Backend, choose_backend, why_not_triton
from slothplug.kernels.glu import DTYPES, LAYOUTS, Activation, Layout, glu, glu_packed, split_packed
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import difference, preserved_rng, probe_rows
from slothplug.patching.recording import why_recorded
from slothplug.patching.sites import (
    Kernel,
    Left,
    Operation,
    Served,
    Site,
    device_of,
    dtype_of,
    plain,
    why_not_touchable,
)
from slothplug.patching.twin import Settled, fingerprint, twin
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "glu"

# Widths of a twin's layers: all different, so that no layer can take another's place.
SMALL_HIDDEN, SMALL_INTERMEDIATE, SMALL_OUT = 8, 12, 10

# A forward that reads widths from its configuration needs a twin of its real size: up to 256 MB of float32.
LARGEST_TWIN = 64_000_000

# Three linear layers, an activation, dropouts or identities: more children are something else.
MOST_CHILDREN = 6

# Gates and values of a float16 probe stay where their products are finite.
HALF_RANGE = 8.0

FORMULAS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True)
class GatedMLP:
    """What one gated MLP computes. Roles are names of children; ``up`` is None where ``gate`` holds both."""

    gate: str
    up: str | None
    down: str
    activation: Activation
    layout: Layout | None = None
    up_first: bool = False
    """Stock calls ``up`` before ``gate``: the order in which dropout inside adapters draws."""
    bypassed: tuple[str, ...] = ()
    """Children that stock calls and the fast forward does not: activation, Identity, Dropout with p = 0."""
    settled: Mapping[str, Settled] = field(default_factory=dict, compare=False)
    """The attributes that they, and the MLP itself under the name of "", had when this was learnt."""

    def arguments(self) -> dict[str, str]:
        """Keyword arguments of the kernel."""
        if self.layout is None:
            return {"activation": self.activation}
        return {"activation": self.activation, "layout": self.layout}


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


@dataclass(frozen=True)
class Identified:
    """A gated MLP, and the shape of the twin on which it was recognised."""

    mlp: GatedMLP
    shape: Shape


@dataclass(frozen=True)
class Unknown:
    """Why a candidate is no gated MLP that can be served; ``reason`` is empty where it is no gated MLP at all."""

    reason: str = ""


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [Operation(NAME, "Activation and product of a gated MLP in one pass, forward and backward")]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    backend = choose_backend(device) if settings.backend == "auto" else settings.backend
    if backend == "triton" and why_not_triton(device):
        return None
    return Kernel(NAME, backend, partial(_glu, backend=backend))


def _glu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    *,
    activation: Activation,
    layout: Layout = "gate_up",
    backend: Backend,
) -> torch.Tensor:
    if up is None:
        return glu_packed(gate, activation=activation, layout=layout, backend=backend)
    return glu(gate, up, activation=activation, backend=backend)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    identified: dict[Hashable, Identified | Unknown] = {}
    for name, module in model.named_modules():
        shapes = _shapes(module)
        if not shapes:
            continue
        device, dtype = device_of(module), dtype_of(module)
        if device.type == "meta":
            yield Left(NAME, name, module, "its weights are on the meta device")
            continue
        key = _key(module)
        if key not in identified:
            identified[key] = identify(module, shapes)
        found = identified[key]
        kernel = kernel_for(NAME, device, dtype, settings)
        untouchable = why_not_touchable(module)
        if isinstance(found, Unknown):
            if found.reason:
                yield Left(NAME, name, module, untouchable or found.reason)
        elif untouchable:
            yield Left(NAME, name, module, untouchable)
        elif len(_weight_dtypes(module)) > 1:
            yield Left(NAME, name, module, "its linear layers have weights of different dtypes")
        elif kernel is None:
            yield Left(NAME, name, module, f"no kernel for {device.type} and {dtype}")
        else:
            proof = partial(prove, module, found, kernel)
            yield Site(NAME, name, module, fast_glu, found.mlp, kernel, proof, (key, dtype))


def fast_glu(module: nn.Module, served: Served, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the MLP's forward."""
    mlp: GatedMLP = served.params
    modules: Mapping[str, Any] = module._modules
    if reason := _why_not(modules, mlp, served.device_type, args, kwargs) or _why_changed(module, mlp):
        return served.fall_back(module, reason, *args, **kwargs)
    gate, up = _gate_and_up(modules, mlp, args[0])
    if _fusable(gate, up, served.device_type):
        h = served.calls.serve(served.kernel(gate, up, **mlp.arguments()))
    else:
        # The layers were called: calling the original forward now would run them, and their hooks, twice.
        served.calls.fallbacks["gate and up are no plain tensors of one known dtype"] += 1
        h = formula(gate, up, mlp)
    output: torch.Tensor = modules[mlp.down](h)
    return output


def _gate_and_up(
    modules: Mapping[str, Any], mlp: GatedMLP, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls the inner layers in stock's order."""
    if mlp.up is None:
        return modules[mlp.gate](x), None
    if mlp.up_first:
        up = modules[mlp.up](x)
        return modules[mlp.gate](x), up
    return modules[mlp.gate](x), modules[mlp.up](x)


def _why_not(
    modules: Mapping[str, Any],
    mlp: GatedMLP,
    device_type: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    if reason := why_recorded():
        return reason
    if len(args) != 1 or kwargs:
        return "called with other arguments than the hidden states"
    x = args[0]
    if not plain(x) or not x.is_floating_point():
        return f"input of type {type(x).__name__}"
    if x.device.type != device_type:
        return f"input on {x.device.type}, patched for {device_type}"
    for name in mlp.bypassed:
        child = modules[name]
        if _hooked(child):
            return f"hooks on {name}"
        if child.training and getattr(child, "p", 0):
            return f"dropout in {name}"
    return None


def _why_changed(module: nn.Module, mlp: GatedMLP) -> str | None:
    for name, settled in mlp.settled.items():
        part = module._modules[name] if name else module
        if part is None or not settled.fits(part):
            return f"{name or 'the MLP'} was changed after the patch"
    return None


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _fusable(gate: object, up: object, device_type: str) -> bool:
    if not plain(gate) or gate.dtype not in DTYPES or gate.device.type != device_type:  # type: ignore[attr-defined]
        return False
    return up is None or (plain(up) and up.dtype == gate.dtype and up.shape == gate.shape)  # type: ignore[attr-defined]


def formula(gate: torch.Tensor, up: torch.Tensor | None, mlp: GatedMLP) -> torch.Tensor:
    """The product in plain PyTorch, with the roundings of the stock modules."""
    if up is None:
        gate, up = split_packed(gate, mlp.layout or "gate_up")
    return FORMULAS[mlp.activation](gate) * up


def identify(module: nn.Module, shapes: list[Shape]) -> Identified | Unknown:
    """Finds roles, activation and layout with which the formula reproduces a twin of the module in float32.

    The twin has recording linear layers, small ones unless its forward insists on the real widths.
    """
    device = device_of(module)
    outcomes = []
    with preserved_rng(), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for shape in shapes:
            outcome = _identify(module, shape)
            if isinstance(outcome, Identified):
                return outcome
            outcomes.append(outcome)
    return next((unknown for unknown in outcomes if unknown.reason), Unknown())


def _identify(module: nn.Module, real: Shape) -> Identified | Unknown:
    for shape in (real.shrunk(), real):
        if shape.elements() > LARGEST_TWIN:
            break
        try:
            return _recognise(module, shape)
        except Exception:  # the twin's forward does not run on these widths, or on one tensor
            continue
    # Three equal square layers are more often an attention than an MLP, and nothing to report.
    return Unknown("its forward does not run on hidden states alone") if real.intermediate != real.hidden else Unknown()


def _recognise(module: nn.Module, shape: Shape) -> Identified | Unknown:
    candidates: list[GatedMLP] | None = None
    for training in (True, False):
        double, calls = _recording_twin(module, shape, training)
        x = probe_rows(shape.hidden, torch.float32, device_of(module)).detach()
        expected = double(x)
        order = [call.name for call in calls]
        called = {call.name: call for call in calls}
        if sorted(order) != sorted((*shape.inner, shape.down)) or order[-1] != shape.down:
            return Unknown()
        if not all(called[name].input.equal(x) for name in shape.inner) or called[shape.down].input.equal(x):
            return Unknown()
        if not isinstance(expected, torch.Tensor) or not torch.equal(expected, called[shape.down].output):
            return _why_unknown(module, "its forward returns something else than what its last layer returns")
        if candidates is None:
            candidates = list(_candidates(module, shape, order))
        h = called[shape.down].input
        candidates = [
            mlp
            for mlp in candidates
            if _same(formula(called[mlp.gate].output, called[mlp.up].output if mlp.up else None, mlp), h)
        ]
        if not candidates:
            return _why_unknown(module, "computes something else than act(gate) * up between its linear layers")
    assert candidates
    parts = {"": module, **{name: module._modules[name] for name in candidates[0].bypassed}}
    settled = {name: Settled(part) for name, part in parts.items() if part is not None}
    return Identified(replace(candidates[0], settled=settled), shape)


def _why_unknown(module: nn.Module, otherwise: str) -> Unknown:
    dropouts = [name for name, child in _children(module) if isinstance(child, nn.Dropout) and child.p > 0]
    if dropouts:
        return Unknown(f"dropout between its layers ({', '.join(dropouts)})")
    return Unknown(otherwise)


def _candidates(module: nn.Module, shape: Shape, order: list[str]) -> Iterator[GatedMLP]:
    bypassed = tuple(name for name in module._modules if name not in (*shape.inner, shape.down))
    for activation in FORMULAS:
        if len(shape.inner) == 1:
            for layout in LAYOUTS:
                yield GatedMLP(shape.inner[0], None, shape.down, activation, layout, bypassed=bypassed)  # type: ignore[arg-type]
        else:
            for gate, up in itertools.permutations(shape.inner):
                yield GatedMLP(gate, up, shape.down, activation, up_first=order[0] == up, bypassed=bypassed)


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to a few float32 roundings of each row's largest value."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return bool(((got - expected).abs() <= 2e-6 * scale).all())


def prove(module: nn.Module, found: Identified, kernel: Kernel) -> str | None:
    """Compares output, input gradient and weight gradients with a twin's, in float32 and in the module's dtype."""
    for dtype in dict.fromkeys((torch.float32, dtype_of(module))):
        double, _ = _recording_twin(module, found.shape, training=True, dtype=dtype)
        x = probe_rows(found.shape.hidden, dtype, device_of(module))
        if dtype is torch.float16:
            x = x.detach().clamp(-HALF_RANGE, HALF_RANGE).requires_grad_()
        fast = partial(_with_kernel, double._modules, found.mlp, kernel.function)
        if reason := difference(fast, double, [x], list(double.parameters())):
            return f"in {dtype}: {reason}"
    return None


def _with_kernel(
    modules: Mapping[str, Any], mlp: GatedMLP, kernel: Callable[..., torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    gate, up = _gate_and_up(modules, mlp, x)
    output: torch.Tensor = modules[mlp.down](kernel(gate, up, **mlp.arguments()))
    return output


@dataclass
class _Called:
    name: str
    input: torch.Tensor
    output: torch.Tensor


class _RecordingLinear(nn.Linear):
    """A twin's linear layer, which writes down its calls."""

    name: str
    calls: list[_Called]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        self.calls.append(_Called(self.name, input, output))
        return output


def _recording_twin(
    module: nn.Module, shape: Shape, training: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, list[_Called]]:
    """A twin of the module whose linear layers record and have the widths of ``shape``; other children are copied."""
    calls: list[_Called] = []
    factor = 2 if len(shape.inner) == 1 else 1
    widths = {
        **dict.fromkeys(shape.inner, (shape.hidden, factor * shape.intermediate)),
        shape.down: (shape.intermediate, shape.out),
    }
    children: dict[str, nn.Module] = {}
    for name, child in _children(module):
        if name in widths:
            linear = _RecordingLinear(*widths[name], bias=_has_bias(child), device=device_of(module), dtype=dtype)
            linear.name, linear.calls = name, calls
            children[name] = linear
        else:
            children[name] = copy.deepcopy(child).train(training)
    double = twin(module, dtype, children)
    double.training = training
    return double, calls


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children by name, one that is there twice under both names."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def _shapes(module: nn.Module) -> list[Shape]:
    """The ways in which the linear children can be gate, up and down; empty where the module is no candidate."""
    if module._parameters or module._buffers or not 2 <= len(module._modules) <= MOST_CHILDREN:
        return []
    widths: dict[str, tuple[int, int]] = {}
    for name, child in _children(module):
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


def _weight_dtypes(module: nn.Module) -> set[torch.dtype]:
    """The floating dtypes of the linear children's weights; packed integers of quantised ones do not count."""
    weights = (getattr(child, "weight", None) for child in module._modules.values())
    return {weight.dtype for weight in weights if isinstance(weight, torch.Tensor) and weight.is_floating_point()}


def _key(module: nn.Module) -> Hashable:
    """Modules of equal keys compute the same: class, children's kinds, and every attribute, by value or by identity."""
    children = tuple(
        (name, stock_class(child), _widths(child) or fingerprint(child), _has_bias(child))
        for name, child in _children(module)
    )
    return stock_class(module), children, fingerprint(module)
