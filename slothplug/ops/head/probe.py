"""The probe of a head: fused and stock loss of a small head, forward and every gradient, after each epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.ops.head import adapter
from slothplug.ops.head.adapter import Probe
from slothplug.ops.head.forward import HeadSpec, head_call_of
from slothplug.ops.head.label_count import LabelCounts
from slothplug.ops.head.lazy_logits import put_off
from slothplug.ops.peft_lora.layer import Precision
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import seed_generators
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.proof import difference, probe_rows
from slothplug.patching.served import Calls, Served
from slothplug.patching.sites import Kernel, Refusal
from slothplug.settings import Settings

# Odd sizes, and logits of a few units at most, so that softmax does not magnify rounding.
_HIDDEN, _VOCABULARY, _SCALES = 48, 97, (1e-3, 0.1, 1.0)
_EPILOGUES: tuple[tuple[EpilogueStep, ...], ...] = (
    (),
    (("cast", torch.float32),),
    (("mul", 0.0625), ("cast", torch.float32)),
    (("div", 30.0), ("tanh", None), ("mul", 30.0), ("cast", torch.float32)),
)


def prove(head: nn.Module, kernel: Kernel, precision: Precision) -> Refusal | None:
    """Compares the fused loss with the stock loss of small twins of the head: in float32, and as the head is used.

    ``precision`` is that of a LoRA adapter on the head.
    """
    for probe in adapter.probes(head, _SCALES) if adapter.is_lora(head) else _probes(head):
        for epilogue in _EPILOGUES:
            if refusal := _compare(probe, epilogue, kernel, precision):
                return refusal.within(f"{probe.words}, epilogue {[name for name, _ in epilogue]}")
    return None


def _probes(head: nn.Module) -> Iterator[Probe]:
    """In float32 and in the head's own dtype."""
    device, has_bias = device_of(head), getattr(head, "bias", None) is not None
    for dtype in dict.fromkeys((torch.float32, dtype_of(head))):
        small = nn.Linear(_HIDDEN, _VOCABULARY, has_bias, device=device, dtype=dtype)
        yield Probe(small, probe_rows(_HIDDEN, dtype, device, _SCALES), False, dtype, f"in {dtype}")


def _compare(probe: Probe, epilogue: tuple[EpilogueStep, ...], kernel: Kernel, precision: Precision) -> Refusal | None:
    twin: Any = probe.twin
    hidden, device = probe.hidden, probe.hidden.device
    vocabulary = getattr(twin, "base_layer", twin).out_features
    labels = torch.randint(vocabulary, hidden.shape[:-1], device=device).flatten()
    labels[2] = -100
    spec, calls, context = HeadSpec(2**20, precision), Calls(), ModelContext(Settings())
    served = Served("head", "", spec, kernel.function, device.type, type(twin).forward, context, LabelCounts(), calls)

    def fused(x: torch.Tensor) -> torch.Tensor:
        call = head_call_of(twin, served, x)
        return served.fall_back(twin, call, x) if isinstance(call, Refusal) else put_off(call)

    def loss_of(logits: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        seed_generators(1)  # for one mask of dropout
        with torch.autocast(device.type, enabled=probe.autocast, dtype=torch.get_autocast_dtype(device.type)):
            return _loss(logits(x), epilogue, labels)

    ours, stock = partial(loss_of, fused), partial(loss_of, twin)
    refusal = difference(ours, stock, [hidden], list(twin.parameters()), probe.computed_in)
    return refusal or next((Refusal(f"the loss was not fused: {why}") for why in calls.fallbacks), None)


def _loss(logits: torch.Tensor, epilogue: tuple[EpilogueStep, ...], labels: torch.Tensor) -> torch.Tensor:
    """What models do between head and loss, in the notation of the kernel."""
    for name, value in epilogue:
        if name == "tanh":
            logits = torch.tanh(logits)
        elif name == "cast":
            logits = logits.to(value)
        else:
            logits = logits * value if name == "mul" else logits / value
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels, reduction="sum")
