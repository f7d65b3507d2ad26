"""The probe of a LoRA layer: fast and stock forward of small twins, alone and as siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slothplug.ops.lora.cast_factors import CastFactors
from slothplug.ops.lora.facts import LoraSpec
from slothplug.ops.lora.forward import fast_lora
from slothplug.ops.lora.siblings import Group, Member
from slothplug.ops.peft_lora.layer import probed_adapter
from slothplug.ops.peft_lora.twins import SMALL_IN, autocast_dtype, regimes, small_twin
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import seed_generators
from slothplug.patching.predicates import device_of
from slothplug.patching.proof import difference, probe_rows
from slothplug.patching.served import STATE, Calls, Served
from slothplug.patching.sites import Kernel, Refusal
from slothplug.settings import Settings

SIBLINGS = 3


def prove(module: Any, spec: LoraSpec, kernel: Kernel, settings: Settings) -> Refusal | None:
    """Compares fast and stock forward on small twins: in float32, in the module's dtypes, under autocast.

    A layer alone has the module's own dropout. Siblings have none, since layers with a mask each share no node; they
    are compared with factors that the kernel casts and with factors that a patched model has cast together.
    """
    device = device_of(module)
    lower = autocast_dtype(module)
    name = probed_adapter(module)
    assert name is not None  # such a module is no site
    for regime in regimes(module, name):
        base, adapter, autocast = regime
        computed_in = lower if autocast else base if settings.lora_precision == "compute" else None
        alone, *siblings = (small_twin(module, name, base, adapter, number) for number in range(1 + SIBLINGS))
        for doubles, shared in (([alone], None), (siblings, None), (siblings, CastFactors())):
            _serve(doubles, spec, shared, kernel, settings)
            x = probe_rows(SMALL_IN, base, device)
            with torch.autocast(device.type, lower, enabled=autocast):
                refusal = _differ(doubles, x, computed_in)
            if refusal:
                which = "siblings, " if doubles is siblings else ""
                return refusal.within(f"{which}{regime}")
    return None


def _serve(
    doubles: Sequence[nn.Module], spec: LoraSpec, shared: CastFactors | None, kernel: Kernel, settings: Settings
) -> None:
    """Gives twins, of which several are siblings, the state of a patched model's layers."""
    calls, context, group = Calls(), ModelContext(settings), Group(doubles)
    for index, double in enumerate(doubles):
        own = spec._replace(member=Member(group, index) if len(doubles) > 1 else None)
        double.__dict__[STATE] = Served(
            "lora", "", own, kernel.function, device_of(double).type, type(double).forward, context, shared, calls
        )


def _differ(doubles: Sequence[nn.Module], x: torch.Tensor, computed_in: torch.dtype | None) -> Refusal | None:
    """Why ``doubles`` do not compute on ``x`` what they do in stock."""

    def fast(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [fast_lora(double, double.__dict__[STATE], x) for double in doubles]

    def stock(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [double(x) for double in doubles]

    weights = [parameter for double in doubles for parameter in double.parameters() if parameter.requires_grad]
    if refusal := difference(fast, stock, [x], weights, computed_in):
        return refusal
    calls: Calls = doubles[0].__dict__[STATE].calls
    if calls.collected != len(doubles) - 1:
        return Refusal("not served: siblings did not share a node")
    return next((Refusal(f"not served: {why}") for why in calls.fallbacks), None)
