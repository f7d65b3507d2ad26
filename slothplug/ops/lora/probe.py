"""The probe of a LoRA layer: fast and stock forward of small twins, alone and as siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.kernels.lora import Precision
from slothplug.ops.lora.cast_factors import Casts
from slothplug.ops.lora.forward import fast_lora
from slothplug.ops.lora.siblings import Group, Member
from slothplug.ops.peft_lora.four_bit import computes_in, is_coarser, is_four_bit, small_base
from slothplug.ops.peft_lora.layer import probed_adapter
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import seed_generators
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.proof import difference, probe_rows
from slothplug.patching.served import STATE, Calls, Served
from slothplug.patching.sites import Kernel, Refusal
from slothplug.patching.twin import twin
from slothplug.settings import Settings

# A twin's sizes, all different.
SMALL_IN, SMALL_OUT, SMALL_RANK = 16, 24, 4
SIBLINGS = 3


class Regime(NamedTuple):
    """Dtypes of a probe: those of the base layer and of the adapter, and whether autocast is on."""

    base: torch.dtype
    adapter: torch.dtype
    autocast: bool

    def __str__(self) -> str:
        return f"base {self.base}, adapter {self.adapter}, autocast {'on' if self.autocast else 'off'}"


def regimes(module: Any, name: str) -> tuple[Regime, ...]:
    """What a LoRA layer is probed in: float32, its own dtypes, and those under autocast."""
    base = module.base_layer
    dtypes = computes_in(base) if is_four_bit(base) else dtype_of(base), module.lora_A[name].weight.dtype
    in_float32, outside, under = (
        Regime(torch.float32, torch.float32, False),
        Regime(*dtypes, False),
        Regime(*dtypes, True),
    )
    if is_four_bit(base) and is_coarser(base.weight.quant_state.dtype, computes_in(base)):
        return in_float32, under  # outside autocast it is answered by the original forward
    return in_float32, outside, under


def autocast_dtype(module: Any) -> torch.dtype:
    """Autocast's dtype in the probe: the default, but not where the base layer computes in another 16-bit dtype."""
    base = module.base_layer
    if is_four_bit(base) and computes_in(base) is not torch.float32:
        return computes_in(base)
    return torch.get_autocast_dtype(device_of(module).type)


def prove(module: Any, kernel: Kernel, precision: Precision) -> Refusal | None:
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
        computed_in = lower if autocast else base if precision == "compute" else None
        alone, *siblings = (small_twin(module, name, base, adapter, number) for number in range(1 + SIBLINGS))
        for doubles, casts in (([alone], None), (siblings, None), (siblings, Casts())):
            x = probe_rows(SMALL_IN, base, device)
            with torch.autocast(device.type, lower, enabled=autocast):
                refusal = _differ(doubles, casts, kernel, x, computed_in)
            if refusal:
                which = "siblings, " if doubles is siblings else ""
                return refusal.within(f"{which}{regime}")
    return None


def _differ(
    doubles: Sequence[nn.Module],
    casts: Casts | None,
    kernel: Kernel,
    x: torch.Tensor,
    computed_in: torch.dtype | None,
) -> Refusal | None:
    """Why ``doubles``, of which several are siblings, do not compute on ``x`` what they do in stock."""
    calls, context = Calls(), ModelContext(Settings())
    group = Group(doubles)
    for index, double in enumerate(doubles):
        member = Member(group, index) if len(doubles) > 1 else None
        double.__dict__[STATE] = Served(
            "lora", "", member, kernel.function, x.device.type, type(double).forward, context, casts, calls
        )

    def fast(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [fast_lora(double, double.__dict__[STATE], x) for double in doubles]

    def stock(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [double(x) for double in doubles]

    weights = [parameter for double in doubles for parameter in double.parameters() if parameter.requires_grad]
    if refusal := difference(fast, stock, [x], weights, computed_in):
        return refusal
    if calls.collected != len(doubles) - 1:
        return Refusal("not served: siblings did not share a node")
    return next((Refusal(f"not served: {why}") for why in calls.fallbacks), None)


def small_twin(module: Any, name: str, base: torch.dtype, adapter: torch.dtype, number: int = 0) -> nn.Module:
    """A LoRA layer of the module's class and configuration with small random parts; B is not zero.

    Every ``number`` has other sizes; from 1 on they are siblings' twins: without dropout, the first with a bias.
    """
    device = device_of(module)
    dropout = nn.Identity() if number else type(module.lora_dropout[name])(getattr(module.lora_dropout[name], "p", 0.0))
    size_out, rank = SMALL_OUT + 4 * number, SMALL_RANK + number

    def linear(size_in: int, size_out: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
        return nn.Linear(size_in, size_out, bias=bias, device=device, dtype=dtype)

    bias = number == 1 or module.base_layer.bias is not None
    if is_four_bit(module.base_layer):
        base_layer = small_base(module.base_layer, SMALL_IN, size_out, bias, base)
    else:
        base_layer = linear(SMALL_IN, size_out, bias, base)
    second = linear(rank, size_out, module.lora_B[name].bias is not None, adapter)
    double = twin(
        module,
        base,
        {
            "base_layer": base_layer,
            "lora_A": nn.ModuleDict({name: linear(SMALL_IN, rank, False, adapter)}),
            "lora_B": nn.ModuleDict({name: second}),
            "lora_dropout": nn.ModuleDict({name: dropout}),
        },
    )
    double.__dict__.update(_disable_adapters=False, merged_adapters=[], _active_adapter=name, training=True)
    return double
