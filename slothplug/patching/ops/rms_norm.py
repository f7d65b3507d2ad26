"""RMSNorm sites: leaf modules with at most one weight vector whose forward is one of the known RMS normalisations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.backend import choose_backend, why_not_triton
from slothplug.kernels.rms_norm import DTYPES, rms_norm
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import PROBE_RMS, difference, probe_rows
from slothplug.patching.recording import why_recorded
from slothplug.patching.sites import Kernel, Left, Operation, Served, Site, device_of, dtype_of, plain
from slothplug.patching.twin import twin
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "rms_norm"


@dataclass(frozen=True)
class Variant:
    """How a norm rounds and what it adds to its weight; the arguments of ``kernels.rms_norm``."""

    casting: Literal["before_weight", "after_weight"]
    offset: float = 0.0


@dataclass(frozen=True)
class Norm:
    """What one norm module needs beside its weight."""

    variant: Variant
    eps: float
    weight: str | None
    """Name of the weight parameter."""


VARIANTS = (
    Variant("before_weight"),  # Llama, T5: cast back, then times w
    Variant("after_weight"),  # times w in float32, then cast back
    Variant("after_weight", offset=1.0),  # Gemma
    Variant("before_weight", offset=1.0),
)

# Where a class keeps no eps on the instance: the values written into forwards of transformers 4.56 to 5.24.
CONSTANT_EPS = (1e-5, 1e-6, 1e-8)


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [Operation(NAME, "RMS normalisation in one pass over the rows, forward and backward")]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    backend = choose_backend(device) if settings.backend == "auto" else settings.backend
    if backend == "triton" and why_not_triton(device):
        return None
    return Kernel(NAME, backend, partial(rms_norm, backend=backend))


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    identified: dict[Any, Norm | None] = {}
    for name, module in model.named_modules():
        if not _is_candidate(module):
            continue
        named = "rmsnorm" in stock_class(module).__name__.lower()
        if device_of(module).type == "meta":
            if named:
                yield Left(NAME, name, module, "its weights are on the meta device")
            continue
        key = (stock_class(module), _width(module), *sorted(_epsilons(module)))
        if key not in identified:
            identified[key] = identify(module)
        norm = identified[key]
        if norm is None:
            if named:
                yield Left(NAME, name, module, "computes something else than the known RMS normalisations")
            continue
        kernel = kernel_for(NAME, device_of(module), dtype_of(module), settings)
        if kernel is None:
            yield Left(NAME, name, module, f"no kernel for {device_of(module).type} and {dtype_of(module)}")
            continue
        yield Site(
            NAME, name, module, fast_norm, norm, kernel, partial(prove, module, norm, kernel), (key, dtype_of(module))
        )


def fast_norm(module: nn.Module, served: Served, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the norm's forward."""
    norm: Norm = served.params
    if args or kwargs:
        return served.fall_back(module, "called with more than the hidden states", x, *args, **kwargs)
    weight = _weight(module, norm.weight) if norm.weight else None
    if reason := _why_not(x, weight, served.device_type):
        return served.fall_back(module, reason, x)
    return served.calls.serve(
        served.kernel(x, weight, norm.eps, offset=norm.variant.offset, casting=norm.variant.casting)
    )


def _why_not(x: torch.Tensor, weight: torch.Tensor | None, device_type: str) -> str | None:
    if reason := why_recorded():
        return reason
    if not plain(x):
        return f"input of type {type(x).__name__}"
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return f"input of {x.dtype}" + (f", weight of {weight.dtype}" if weight is not None else "")
    if x.device.type != device_type:
        return f"input on {x.device.type}, patched for {device_type}"
    if weight is not None and (not plain(weight) or weight.numel() != x.shape[-1] or weight.device != x.device):
        return "weight is sharded or elsewhere"
    return None


def _weight(module: nn.Module, name: str) -> torch.Tensor:
    """The weight, which is a plain attribute in the replicas of ``nn.DataParallel``."""
    weight = module._parameters.get(name)
    return weight if weight is not None else getattr(module, name)


def identify(module: nn.Module) -> Norm | None:
    """The variant and eps with which the formula reproduces the module: to 1e-6 in float32, to the bit in bfloat16."""
    weight = next(iter(module._parameters), None)
    width = _width(module) or 64
    candidates = [
        Norm(variant, eps, weight)
        for eps in (sorted(_epsilons(module)) or [*CONSTANT_EPS, torch.finfo(torch.float32).eps])
        for variant in (VARIANTS if weight else VARIANTS[:1])
    ]
    device = device_of(module)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16):
            double = twin(module, dtype)
            x = probe_rows(width, dtype, device).detach()
            try:
                expected = double(x)
            except Exception:  # an arbitrary leaf module was asked to be a norm: whatever it raises, it is none
                return None
            candidates = [norm for norm in candidates if _reproduces(norm, double, x, expected)]
    return candidates[0] if candidates else None


def _reproduces(norm: Norm, double: nn.Module, x: torch.Tensor, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor):
        return False
    got = formula(x, double._parameters[norm.weight] if norm.weight else None, norm)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if x.dtype is torch.float32:
        return torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
    return torch.equal(got, expected)


def formula(x: torch.Tensor, weight: torch.Tensor | None, norm: Norm) -> torch.Tensor:
    """The variant in plain PyTorch, with the roundings of the stock modules."""
    x32 = x.float()
    n = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.eps)
    if weight is None:
        return n.to(x.dtype)
    if norm.variant.casting == "after_weight":
        return (n * (weight.float() + norm.variant.offset)).to(x.dtype)
    return n.to(x.dtype) * (weight + norm.variant.offset if norm.variant.offset else weight)


def prove(module: nn.Module, norm: Norm, kernel: Kernel) -> str | None:
    """Compares the kernel with twins of the module, in float32 and in the module's own dtype."""
    for dtype in dict.fromkeys((torch.float32, dtype_of(module))):
        double = twin(module, dtype)
        weight = double._parameters[norm.weight] if norm.weight else None
        fast: Callable[[torch.Tensor], torch.Tensor] = partial(
            kernel.function, weight=weight, eps=norm.eps, offset=norm.variant.offset, casting=norm.variant.casting
        )
        x = probe_rows(_width(module) or 64, dtype, device_of(module))
        weights = [weight] if weight is not None else []
        if reason := difference(fast, double, [x], weights):
            return f"in {dtype}, rows of rms {PROBE_RMS}: {reason}"
    return None


def _is_candidate(module: nn.Module) -> bool:
    """A leaf without buffers, with at most one vector of weights, whose forward needs one tensor."""
    base = stock_class(module)
    if module._modules or module._buffers or len(module._parameters) > 1:
        return False
    if any(parameter is None or parameter.ndim != 1 for parameter in module._parameters.values()):
        return False
    if base.__module__.startswith("torch.nn.") and base is not getattr(nn, "RMSNorm", None):
        return False
    parameters = list(inspect.signature(base.forward).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) == 1


def _width(module: nn.Module) -> int | None:
    return next((parameter.numel() for parameter in module._parameters.values() if parameter is not None), None)


def _epsilons(module: nn.Module) -> set[float]:
    """Every small positive float the instance holds: one of them may be its eps."""
    return {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}
