"""Small twins of PEFT's LoRA layers, and the dtypes in which they are probed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from slothplug.ops.peft_lora.four_bit import computes_in, is_coarser, is_four_bit, small_base
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.twin import twin

# All different.
SMALL_IN, SMALL_OUT, SMALL_RANK = 16, 24, 4


class Regime(NamedTuple):
    """Dtypes of a probe: of the base layer and of the adapter, and whether autocast is on."""

    base: torch.dtype
    adapter: torch.dtype
    autocast: bool

    def __str__(self) -> str:
        return f"base {self.base}, adapter {self.adapter}, autocast {'on' if self.autocast else 'off'}"


def regimes(module: Any, name: str) -> tuple[Regime, ...]:
    """What the adapter ``name`` of a LoRA layer is probed in: float32, its own dtypes, and those under autocast."""
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
    """Autocast's dtype in the probe: the default, unless the base layer computes in another 16-bit dtype."""
    base = module.base_layer
    if is_four_bit(base) and computes_in(base) is not torch.float32:
        return computes_in(base)
    return torch.get_autocast_dtype(device_of(module).type)


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
