"""An output head with a LoRA adapter: whether it can be served, what a call reads from it, and its probe.

Nothing is taken from PEFT's layer at patch time. Each call asks which adapter is active, whether adapters are disabled
or merged, and what its parts are (``ops.peft_lora.layer``); what is not plain LoRA is answered by PEFT's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from slothplug.kernels.linear_cross_entropy import LowRank
from slothplug.kernels.lora import DTYPES
from slothplug.ops.peft_lora.layer import LoraParts, Precision, peft_layers, probed_adapter, read_lora, refusal_of
from slothplug.ops.peft_lora.twins import SMALL_IN, regimes, small_twin
from slothplug.patching.predicates import device_of, plain
from slothplug.patching.private_class import stock_class
from slothplug.patching.proof import probe_rows
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import UNWATCHED


class Parts(NamedTuple):
    """What a call multiplies by: the head's own ``weight`` and ``bias``, and an adapter where one takes part."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    adapter: LoraParts | None = None


def is_lora(head: nn.Module) -> bool:
    layers = peft_layers()
    return layers is not None and isinstance(head, layers.LoraLayer)


def why_not_plain_lora(head: Any) -> Refusal | None:
    """Why a LoRA layer cannot be served as a head, in any state that it may come into later."""
    refusal = refusal_of(head, peft_layers().Linear, four_bit_too=False)
    if refusal is not None:
        return Refusal(f"an adapter is on the head, and {refusal.reason}", refusal.excused)
    name = probed_adapter(head)
    if head.lora_B[name].bias is not None:
        return Refusal("an adapter is on the head, and its second layer has a bias")
    return None


def parts_of(module: nn.Module) -> Parts | Refusal:
    """What a LoRA layer's call multiplies by as it is now, or why PEFT's forward is to answer it."""
    own = module.__dict__
    if own["_disable_adapters"] and not own["merged_adapters"]:  # where they are merged, PEFT's forward unmerges
        base = own["_modules"]["base_layer"]
        if not UNWATCHED.unhooked(base) or stock_class(base) is not nn.Linear:
            return Refusal("adapters are disabled, and the base layer is no plain linear layer or has hooks")
        return Parts(base._parameters.get("weight"), base._parameters.get("bias"))
    found = read_lora(module, hooks_on_itself=True)
    if isinstance(found, Refusal):
        return found
    if found.operand.b_bias is not None:
        return Refusal("the adapter's second layer has a bias")
    if found.compute_dtype is not None:
        return Refusal("its weight is packed")
    return Parts(found.operand.weight, found.operand.bias, found)


def merged(module: nn.Module) -> tuple[str, ...]:
    """The adapters that are in the base layer's weight now."""
    return tuple(module.__dict__["merged_adapters"])


def why_not_adapter(found: LoraParts, weight: torch.Tensor, hidden: torch.Tensor) -> Refusal | None:
    """Why these tensors go PEFT's way."""
    if found.operand.scaling == 0:
        return Refusal("the adapter's scaling is 0")  # a product times 0 is skipped, and may have been nan
    a, b = found.operand.a, found.operand.b
    if not all(plain(t) and t.device == hidden.device and not hasattr(t, "ds_id") for t in (a, b)):
        return Refusal("the adapter is sharded or elsewhere")
    if a.shape[1:] != hidden.shape[-1:] or b.shape != (weight.shape[0], a.shape[0]):
        return Refusal("the adapter is partitioned, or does not fit the head")
    if b.dtype is not a.dtype or (a.dtype not in DTYPES and a.dtype is not hidden.dtype):
        return Refusal(f"input of {hidden.dtype}, adapter of {a.dtype} and {b.dtype}")
    return None


def low_rank_of(found: LoraParts, hidden: torch.Tensor, precision: Precision) -> LowRank:
    """The adapter's share of the logits of ``hidden`` [..., H]: casts, dropout's mask and ``A`` as PEFT has them."""
    a, b = found.operand.a, found.operand.b
    x = hidden.to(a.dtype)
    if found.dropout is not None:
        x = found.dropout(x)
    if precision == "compute" and not torch.is_autocast_enabled(hidden.device.type):
        x, a = x.to(hidden.dtype), a.to(hidden.dtype)
    return LowRank(F.linear(x, a), b, found.operand.scaling)


class Probe(NamedTuple):
    """A twin of a head with what to run it on.

    Attributes:
        twin: a small linear layer, or LoRA layer of the head's class and configuration, whose B is not zero.
        hidden: [1, rows, H] that requires grad.
        autocast: whether it is on.
        computed_in: the coarsest dtype on the way.
        words: what distinguishes it, for the report.
    """

    twin: nn.Module
    hidden: torch.Tensor
    autocast: bool
    computed_in: torch.dtype
    words: str


def probes(head: Any, scales: tuple[float, ...]) -> Iterator[Probe]:
    """In float32, in the head's dtypes, and under autocast. ``scales`` are those of the rows of hidden states."""
    device = device_of(head)
    lower = torch.get_autocast_dtype(device.type)
    name = probed_adapter(head)
    assert name is not None  # such a head is no site
    scales = tuple(scale / max(1.0, abs(head.scaling[name])) for scale in scales)
    for regime in regimes(head, name):
        base, adapter, autocast = regime
        yield Probe(
            small_twin(head, name, base, adapter),
            probe_rows(SMALL_IN, base, device, scales),
            autocast,
            lower if autocast else max(base, adapter, key=lambda dtype: torch.finfo(dtype).eps),
            str(regime),
        )
