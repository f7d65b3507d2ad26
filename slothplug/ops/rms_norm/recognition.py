"""Which RMS normalisation a module computes, found by calls of twins of it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from slothplug.kernels.rms_norm import Casting, rms_norm
from slothplug.patching.fingerprint import fingerprint
from slothplug.patching.precision import preserved_rng
from slothplug.patching.predicates import device_of
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import PROBE_RMS, probe_rows
from slothplug.patching.settled import Settled
from slothplug.patching.sites import Refusal
from slothplug.patching.twin import twin

Dtypes = tuple[torch.dtype, torch.dtype | None, bool]
"""Dtypes of a call: the input's, the weight's, and whether autocast is on."""


@dataclass(frozen=True)
class NormStyle:
    """How a norm rounds and what it adds to its weight; the arguments of ``kernels.rms_norm``."""

    casting: Casting
    offset: float = 0.0


@dataclass(frozen=True)
class Norm:
    """What one norm module computes.

    Attributes:
        style: where the norm rounds.
        eps: name of the attribute that holds eps, or its value where the norm reads it from elsewhere.
        weight: name of the weight parameter; None where there is none.
        proved: the dtypes in which the norm computes what ``kernels.rms_norm`` computes.
        settled: all that the forward reads beside the weight and the attribute that holds eps.
    """

    style: NormStyle
    eps: str | float
    weight: str | None
    proved: frozenset[Dtypes]
    settled: Settled


Candidate = tuple[NormStyle, str | float]
"""A style and an eps, as in ``Norm``."""

STYLES = (
    NormStyle("before_weight"),  # Llama, T5: cast back, then times w
    NormStyle("after_weight"),  # times w in float32, then cast back
    NormStyle("after_weight", offset=1.0),  # Gemma
    NormStyle("before_weight", offset=1.0),
)

# Values written into forwards of transformers 4.57 to 5.24; the last is what torch uses for eps=None.
CONSTANT_EPS = (1e-5, 1e-6, 1e-8, torch.finfo(torch.float32).eps)

# Eps of a twin, to show which attribute the norm reads: far from every usual value.
PROBE_EPS = (0.5, 0.25)

# Mean squares below every usual eps: a norm that replaces a small eps by a larger one differs in these rows.
SMALL_RMS = (1e-6, 0.0)

# Widths that show whether a norm without a weight normalises whole rows or groups, of up to 512 elements.
WEIGHTLESS_WIDTHS = (48, 1040)

PROBE_BATCHES = ((10,), (2, 5), (1, 2, 5))
"""Leading dimensions of the probe's ten rows; inputs of another number of dimensions are not served."""

PROVED_NDIMS = tuple(len(batch) + 1 for batch in PROBE_BATCHES)

LOW = (torch.bfloat16, torch.float16)
PAIRS = (
    *((dtype, dtype) for dtype in (torch.float32, *LOW)),
    *((dtype, torch.float32) for dtype in LOW),  # an embedding or an autocast layer before a norm kept in float32
    *((torch.float32, dtype) for dtype in LOW),  # float32 residuals
)
"""Dtypes of input and weight that are compared."""


def why_not_candidate(module: nn.Module) -> Refusal | None:
    """Why a module cannot be an RMS normalisation of one input by at most one vector of weights; always excused."""
    excuse = partial(Refusal, excused=True)
    base = stock_class(module)
    if module._modules or module._buffers:
        return excuse(f"it has submodules or buffers ({', '.join((*module._modules, *module._buffers))})")
    weights = list(module._parameters.values())
    if len(weights) > 1 or any(weight is None or weight.ndim != 1 for weight in weights):
        return excuse(f"its parameters ({', '.join(module._parameters)}) are not one vector of weights")
    if base.__module__.startswith("torch.nn.") and base is not nn.RMSNorm:
        return excuse("a layer of torch that is no RMS normalisation")
    parameters = list(inspect.signature(base.forward).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return None if len(required) == 1 else excuse(f"its forward takes ({', '.join(required)}), not one input")


def is_gated(module: nn.Module) -> bool:
    """Whether the module normalises and gates, as the norms of Mamba 2 and of gated delta nets do."""
    base = stock_class(module)
    return "rmsnorm" in base.__name__.lower() and "gate" in inspect.signature(base.forward).parameters


def key_of(module: nn.Module) -> Hashable:
    """Modules of equal keys compute the same."""
    widths = tuple((name, parameter.numel()) for name, parameter in module._parameters.items() if parameter is not None)
    return stock_class(module), widths, fingerprint(module)


def identify(module: nn.Module) -> Norm | Refusal:
    """The style and eps with which the formula reproduces the module: to 1e-6 in float32, to the bit in bfloat16."""
    settled = Settled.of(module)
    if isinstance(settled, Refusal):
        return settled
    weight = next(iter(module._parameters), None)
    epsilons: dict[str | float, None] = dict.fromkeys((*_numbers_of(module), *settled.numbers(), *CONSTANT_EPS))
    candidates = [(style, eps) for eps in epsilons for style in (STYLES if weight else STYLES[:1])]
    with preserved_rng(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            candidates = _reproducing(candidates, module, (dtype, dtype if weight else None, False))
        if not candidates:
            return Refusal("computes something else than the known RMS normalisations")
        proved = frozenset(dtypes for dtypes in _all_dtypes(weight) if _reproducing(candidates[:1], module, dtypes))
    style, eps = candidates[0]
    without_eps = Settled.of(module, free=eps) if isinstance(eps, str) else settled
    assert isinstance(without_eps, Settled)  # it compares less than the first one
    return Norm(style, eps, weight, proved, without_eps)


def number(value: object) -> float | None:
    """The value of an eps as the kernel takes it; None where it is no plain number, as a tensor."""
    if type(value) is float:
        return value
    # NumPy's scalars are registered as Real.
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def eps_of(eps: str | float, attributes: Mapping[str, Any]) -> float | None:
    """The value of ``Norm.eps`` in a module of these attributes; None where the attribute is no plain number."""
    return number(attributes.get(eps)) if isinstance(eps, str) else eps


def probe_widths(module: nn.Module) -> tuple[int, ...]:
    """Widths of a probe's rows: a weight is as wide as the rows."""
    return tuple(weight.numel() for weight in module._parameters.values() if weight is not None) or WEIGHTLESS_WIDTHS


def _numbers_of(module: nn.Module) -> list[str]:
    """The attributes that hold a number: one of them may be the eps."""
    return [name for name, value in vars(module).items() if number(value) is not None]


def _all_dtypes(weight: str | None) -> list[Dtypes]:
    pairs = dict.fromkeys((x, w if weight else None) for x, w in PAIRS)
    return [(x, w, autocast) for x, w in pairs for autocast in (False, True)]


def _reproducing(candidates: list[Candidate], module: nn.Module, dtypes: Dtypes) -> list[Candidate]:
    """The candidates that give the numbers of the module's twins, with its own eps and with another one."""
    candidates = _agreeing(candidates, module, dtypes, None)
    for name in dict.fromkeys(eps for _, eps in candidates if isinstance(eps, str)):
        agreeing = _agreeing([each for each in candidates if each[1] == name], module, dtypes, name)
        candidates = [each for each in candidates if each[1] != name or each in agreeing]
    return candidates


def _agreeing(candidates: list[Candidate], module: nn.Module, dtypes: Dtypes, changed: str | None) -> list[Candidate]:
    """The candidates that give a twin's numbers, in training and evaluation, for every proved number of dimensions.

    The twin has another eps than the module where ``changed`` names the attribute that holds eps.
    """
    x_dtype, weight_dtype, autocast = dtypes
    device = device_of(module)
    widths = probe_widths(module) if candidates else ()
    for width, training in itertools.product(widths, (True, False)):
        double = twin(module, weight_dtype or x_dtype)
        double.training = training
        if changed is not None:
            double.__dict__[changed] = next(eps for eps in PROBE_EPS if eps != double.__dict__[changed])
        rows = probe_rows(width, x_dtype, device, (*PROBE_RMS, *SMALL_RMS)).detach()
        for batch in PROBE_BATCHES:
            x = rows.view(*batch, width)
            try:
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    expected = double(x)
            except Exception:  # an arbitrary leaf module was asked to be a norm: whatever it raises, it is none
                return []
            candidates = [each for each in candidates if _reproduces(each, double, x, expected)]
    return candidates


def _reproduces(candidate: Candidate, double: nn.Module, x: torch.Tensor, expected: object) -> bool:
    style, eps = candidate
    value = eps_of(eps, vars(double))
    if not isinstance(expected, torch.Tensor) or value is None:
        return False
    weight = next(iter(double._parameters.values()), None)
    with torch.autocast(x.device.type, enabled=False):
        got = rms_norm(x, weight, value, offset=style.offset, casting=style.casting, backend="torch")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    # A row of zeros with eps = 0 is NaN.
    exact = got.dtype is not torch.float32
    return torch.allclose(got, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6, equal_nan=True)
