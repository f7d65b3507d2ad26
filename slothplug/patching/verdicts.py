"""Whether a site is proved: its probe runs once a process for all sites of one verdict key."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import nn

from slothplug.patching.precision import preserved_rng
from slothplug.patching.predicates import device_of
from slothplug.patching.private_class import stock_class, why_not_subclassed, with_forward
from slothplug.patching.sites import Kernel, Refusal, Site
from slothplug.settings import Settings

_verdicts: dict[Hashable, Refusal | None] = {}
"""Outcome of earlier probes: why the site cannot be served, or None where it can."""


def why_not_private(site: Site[Any]) -> Refusal | None:
    return why_not_subclassed(site.module, lambda base: with_forward(base, site.fast))  # type: ignore[arg-type]


def verdict(site: Site[Any], core: nn.Module, settings: Settings) -> Refusal | None:
    """Why the probe refuses ``site``, or None; compares each verdict key once a process."""
    # The class's forward is part of it: somebody may have replaced that one since.
    forward, device = stock_class(site.module).forward, device_of(site.module, core)
    kernel = (site.kernel.name, site.kernel.backend, _code_of(site.kernel))
    key = (site.op, site.verdict_key, kernel, device.type, forward)
    if not settings.verify:
        return None
    if key not in _verdicts:
        with preserved_rng():
            try:
                refusal = site.prove()
                if refusal is not None and not isinstance(refusal, Refusal):
                    raise TypeError(f"prove returned {type(refusal).__name__}, not Refusal or None")
            except Exception as error:  # a probe that cannot run is a site that cannot be proved, this time
                return Refusal(f"its probe failed: {type(error).__name__}: {error}")
        _verdicts[key] = refusal and refusal.within(f"kernel {site.kernel.name}")
    return _verdicts[key]


def _code_of(kernel: Kernel) -> Hashable:
    """What tells a kernel's function from another of the same name."""
    function = kernel.function
    if not isinstance(function, partial):
        return function
    return function.func, function.args, tuple(sorted(function.keywords.items()))
