"""RMSNorm sites: leaf modules with at most one weight vector whose forward is one of the known RMS normalisations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.rms_norm import DTYPES, Casting, rms_norm
from slothplug.patching.fingerprint import Settled, fingerprint
from slothplug.patching.precision import preserved_rng
from slothplug.patching.predicates import OTHER_ARGUMENTS, device_of, dtype_of, plain, why_not_input, why_not_touchable
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import PROBE_RMS, difference, probe_rows
from slothplug.patching.served import Served
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.patching.transforms import why_not_now
from slothplug.patching.twin import twin
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "rms_norm"


@dataclass(frozen=True)
class NormStyle:
    """How a norm rounds and what it adds to its weight; the arguments of ``kernels.rms_norm``."""

    casting: Casting
    offset: float = 0.0


Dtypes = tuple[torch.dtype, torch.dtype | None, bool]
"""Dtypes of a call: the input's, the weight's, and whether autocast is on."""


@dataclass(frozen=True)
class Norm:
    """What one norm module needs beside its weight."""

    style: NormStyle
    eps: str | float
    """Name of the attribute that holds it, or its value where the class keeps it elsewhere."""
    weight: str | None
    """Name of the weight parameter."""
    proved: frozenset[Dtypes] = frozenset()
    """The dtypes in which the style is the norm's."""
    settled: Settled | None = None
    """The norm's attributes apart from eps."""


STYLES = (
    NormStyle("before_weight"),  # Llama, T5: cast back, then times w
    NormStyle("after_weight"),  # times w in float32, then cast back
    NormStyle("after_weight", offset=1.0),  # Gemma
    NormStyle("before_weight", offset=1.0),
)

# Where a class keeps no eps on the instance: the values written into forwards of transformers 4.57 to 5.24.
CONSTANT_EPS = (1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps)

# Widths that show whether a norm without a weight normalises whole rows or groups, of up to 512 elements.
WEIGHTLESS_WIDTHS = (48, 1040)

PROBE_BATCHES = ((6,), (2, 3), (1, 2, 3))
"""Leading dimensions of the probe's six rows; inputs of another number of dimensions are not served."""

PROVED_NDIMS = tuple(len(batch) + 1 for batch in PROBE_BATCHES)

LOW = (torch.bfloat16, torch.float16)
PAIRS = (
    *((dtype, dtype) for dtype in (torch.float32, *LOW)),
    *((dtype, torch.float32) for dtype in LOW),  # an embedding or an autocast layer before a norm kept in float32
    *((torch.float32, dtype) for dtype in LOW),  # float32 residuals
)
"""Dtypes of input and weight that are compared."""


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME,
            "RMS normalisation in one pass over the rows, forward and backward",
            competitors=("liger_kernel.transformers.rms_norm",),
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    return Kernel.on_backend(NAME, rms_norm, device, settings)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    identified: dict[Hashable, Norm | Refusal] = {}
    for name, module in model.named_modules():
        if _is_gated(module):
            yield Left(NAME, name, module, Refusal("a gated norm", excused=True))
            continue
        if not _is_candidate(module):
            continue
        named = "rmsnorm" in stock_class(module).__name__.lower()
        untouchable = why_not_touchable(module)
        if untouchable and named:
            yield Left(NAME, name, module, untouchable)
            continue
        if device_of(module).type == "meta":
            continue
        key = _key(module)
        if key not in identified:
            identified[key] = identify(module)
        norm = identified[key]
        if isinstance(norm, Refusal):
            if named:
                yield Left(NAME, name, module, norm)
            continue
        device, dtype = device_of(module), dtype_of(module)
        kernel = kernel_for(NAME, device, dtype, settings)
        if untouchable:
            yield Left(NAME, name, module, untouchable)
        elif kernel is None:
            yield Left(NAME, name, module, Refusal(f"no kernel for {device.type} and {dtype}"))
        else:
            yield Site(NAME, name, module, fast_norm, norm, kernel, partial(prove, module, norm, kernel), (key, dtype))


def fast_norm(module: nn.Module, served: Served, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the norm's forward."""
    norm: Norm = served.spec
    if args or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, x, *args, **kwargs)
    weight = _weight(module, norm.weight) if norm.weight else None
    eps = module.__dict__.get(norm.eps) if isinstance(norm.eps, str) else norm.eps
    if reason := _why_not(module, norm, x, weight, eps, served.device_type):
        return served.fall_back(module, reason, x)
    return served.calls.serve(served.kernel(x, weight, eps, offset=norm.style.offset, casting=norm.style.casting))


def _why_not(
    module: nn.Module, norm: Norm, x: torch.Tensor, weight: torch.Tensor | None, eps: object, device_type: str
) -> Refusal | None:
    if reason := why_not_now() or why_not_input(x, device_type):
        return reason
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in DTYPES):
        return Refusal(f"input of {x.dtype}" + (f", weight of {weight.dtype}" if weight is not None else ""))
    if weight is not None and (not plain(weight) or weight.numel() != x.shape[-1] or weight.device != x.device):
        return Refusal("weight is sharded or elsewhere")
    weight_dtype = None if weight is None else weight.dtype
    if (x.dtype, weight_dtype, torch.is_autocast_enabled(x.device.type)) not in norm.proved:
        return Refusal(f"input of {x.dtype}, weight of {weight_dtype}: stock rounds otherwise")
    if x.ndim not in PROVED_NDIMS:
        return Refusal(f"input of {x.ndim} dimensions")
    if not isinstance(eps, float) or (norm.settled is not None and not norm.settled.fits(module)):
        return Refusal("the norm's attributes were changed after the patch")
    return None


def _weight(module: nn.Module, name: str) -> torch.Tensor:
    """The weight, which is a plain attribute in the replicas of ``nn.DataParallel``."""
    weight = module._parameters.get(name)
    return weight if weight is not None else getattr(module, name)


def identify(module: nn.Module) -> Norm | Refusal:
    """The style and eps with which the formula reproduces the module: to 1e-6 in float32, to the bit in bfloat16."""
    weight = next(iter(module._parameters), None)
    epsilons: list[str | float] = [*_epsilons(module), *CONSTANT_EPS]
    candidates = [Norm(style, eps, weight) for eps in epsilons for style in (STYLES if weight else STYLES[:1])]
    with preserved_rng(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            candidates = _reproducing(candidates, module, (dtype, dtype if weight else None, False))
        for norm in candidates[:1]:
            proved = frozenset(dtypes for dtypes in _all_dtypes(weight) if _reproducing([norm], module, dtypes))
            return replace(
                norm, proved=proved, settled=Settled(module, norm.eps if isinstance(norm.eps, str) else None)
            )
    return Refusal("computes something else than the known RMS normalisations")


def _all_dtypes(weight: str | None) -> list[Dtypes]:
    pairs = dict.fromkeys((x, w if weight else None) for x, w in PAIRS)
    return [(x, w, autocast) for x, w in pairs for autocast in (False, True)]


def _reproducing(candidates: list[Norm], module: nn.Module, dtypes: Dtypes) -> list[Norm]:
    """The candidates that give the numbers of the module's twins on inputs of every proved number of dimensions."""
    x_dtype, weight_dtype, autocast = dtypes
    device = device_of(module)
    for width in _probe_widths(module):
        double = _distinct_epsilons(twin(module, weight_dtype or x_dtype))
        rows = probe_rows(width, x_dtype, device).detach()
        for batch in PROBE_BATCHES:
            x = rows.view(*batch, width)
            try:
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    expected = double(x)
            except Exception:  # an arbitrary leaf module was asked to be a norm: whatever it raises, it is none
                return []
            candidates = [norm for norm in candidates if _reproduces(norm, double, x, expected)]
    return candidates


def _distinct_epsilons(double: nn.Module) -> nn.Module:
    """Gives each float that may be the eps a value of its own, and none its original one, to show which is read."""
    for index, name in enumerate(_epsilons(double)):
        double.__dict__[name] *= 2 + index
    return double


def _reproduces(norm: Norm, double: nn.Module, x: torch.Tensor, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor):
        return False
    with torch.autocast(x.device.type, enabled=False):
        got = formula(x, double._parameters[norm.weight] if norm.weight else None, norm.style, _eps(norm, double))
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.dtype is torch.float32:
        return torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
    return torch.equal(got, expected)


def formula(x: torch.Tensor, weight: torch.Tensor | None, style: NormStyle, eps: float) -> torch.Tensor:
    """The style in plain PyTorch, with the roundings of the stock modules."""
    x32 = x.float()
    n = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return n.to(x.dtype)
    if style.casting == "after_weight":
        return (n * (weight.float() + style.offset)).to(x.dtype)
    return n.to(x.dtype) * (weight + style.offset if style.offset else weight)


def prove(module: nn.Module, norm: Norm, kernel: Kernel) -> Refusal | None:
    """Compares the kernel with twins of the module, in float32 and in the module's own dtype."""
    own = dtype_of(module)
    if (own, own if norm.weight else None, False) not in norm.proved:
        return Refusal(f"rounds otherwise in {own}")
    for dtype in dict.fromkeys((torch.float32, own)):
        double = twin(module, dtype)
        weight = double._parameters[norm.weight] if norm.weight else None
        fast: Callable[[torch.Tensor], torch.Tensor] = partial(
            kernel.function,
            weight=weight,
            eps=_eps(norm, double),
            offset=norm.style.offset,
            casting=norm.style.casting,
        )
        x = probe_rows(_probe_widths(module)[-1], dtype, device_of(module))
        weights = [weight] if weight is not None else []
        if refusal := difference(fast, double, [x], weights):
            return refusal.within(f"in {dtype}, rows of rms {PROBE_RMS}")
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


def _is_gated(module: nn.Module) -> bool:
    """Whether it normalises and gates, as Mamba 2's and gated delta nets' norms do."""
    base = stock_class(module)
    return "rmsnorm" in base.__name__.lower() and "gate" in inspect.signature(base.forward).parameters


def _key(module: nn.Module) -> Hashable:
    """Modules of equal keys compute the same."""
    widths = tuple((name, parameter.numel()) for name, parameter in module._parameters.items() if parameter is not None)
    return stock_class(module), widths, fingerprint(module)


def _probe_widths(module: nn.Module) -> tuple[int, ...]:
    """A weight is as wide as the rows."""
    return tuple(weight.numel() for weight in module._parameters.values() if weight is not None) or WEIGHTLESS_WIDTHS


def _epsilons(module: nn.Module) -> list[str]:
    """The attributes that hold a small positive float: one of them may be the eps."""
    return [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 1e-2]


def _eps(norm: Norm, module: nn.Module) -> float:
    eps: float = module.__dict__[norm.eps] if isinstance(norm.eps, str) else norm.eps
    return eps
