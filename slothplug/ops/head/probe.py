"""The probe of a head: fused and stock loss of a small head, forward and every gradient, after each epilogue."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.ops.head import adapter
from slothplug.ops.head.forward import HeadSpec, head_call_of
from slothplug.ops.head.head_call import HeadCall
from slothplug.ops.head.label_count import LabelCounts
from slothplug.ops.head.lazy_logits import put_off
from slothplug.ops.head.statistics_policy import StatisticsPolicy
from slothplug.ops.peft_lora.layer import Precision
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import seed_generators
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.proof import difference
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


def prove(head: nn.Module, kernel: Kernel) -> Refusal | None:
    """Compares the fused loss with a small head's stock loss, in float32 and in the head's own dtype."""
    for dtype in dict.fromkeys((torch.float32, dtype_of(head))):
        for epilogue in _EPILOGUES:
            if refusal := _probe(dtype, device_of(head), getattr(head, "bias", None) is not None, epilogue, kernel):
                return refusal.within(f"in {dtype}, epilogue {[name for name, _ in epilogue]}")
    return None


def _probe(
    dtype: torch.dtype, device: torch.device, has_bias: bool, epilogue: tuple[EpilogueStep, ...], kernel: Kernel
) -> Refusal | None:
    small = nn.Linear(_HIDDEN, _VOCABULARY, has_bias, device=device, dtype=dtype)
    scales = torch.tensor(_SCALES * 2, device=device).view(1, -1, 1)
    hidden = (torch.randn(1, scales.numel(), _HIDDEN, device=device) * scales).to(dtype).requires_grad_()
    labels = torch.randint(_VOCABULARY, (scales.numel(),), device=device)
    labels[2] = -100
    calls = Calls()

    def fused(x: torch.Tensor) -> torch.Tensor:
        call = HeadCall(x, small.weight, small.bias, dtype, kernel.function, 2**20, calls, StatisticsPolicy())
        return _loss(put_off(call), epilogue, labels)

    def stock(x: torch.Tensor) -> torch.Tensor:
        return _loss(F.linear(x, small.weight, small.bias), epilogue, labels)

    refusal = difference(fused, stock, [hidden], list(small.parameters()))
    return refusal or (Refusal("the loss was not fused") if calls.fallbacks else None)


def prove_lora_head(head: nn.Module, kernel: Kernel, precision: Precision) -> Refusal | None:
    """The same for a head with a LoRA adapter: its twins' fused loss, and PEFT's forward with the stock loss."""
    for probe in adapter.probes(head, _SCALES):
        for epilogue in _EPILOGUES:
            if refusal := _probe_lora_head(probe, epilogue, kernel, precision):
                return refusal.within(f"{probe.words}, epilogue {[name for name, _ in epilogue]}")
    return None


def _probe_lora_head(
    probe: adapter.Probe, epilogue: tuple[EpilogueStep, ...], kernel: Kernel, precision: Precision
) -> Refusal | None:
    twin: Any = probe.twin
    hidden, device = probe.hidden, probe.hidden.device
    labels = torch.randint(twin.base_layer.out_features, hidden.shape[:-1], device=device).flatten()
    labels[2] = -100
    spec, calls, context = HeadSpec(2**20, precision), Calls(), ModelContext(Settings())
    served = Served("head", "", spec, kernel.function, device.type, type(twin).forward, context, LabelCounts(), calls)

    def fused(x: torch.Tensor) -> torch.Tensor:
        seed_generators(1)  # for one mask
        with torch.autocast(device.type, enabled=probe.autocast, dtype=torch.get_autocast_dtype(device.type)):
            call = head_call_of(twin, served, x)
            if isinstance(call, Refusal):
                return _loss(served.fall_back(twin, call, x), epilogue, labels)
            return _loss(put_off(call), epilogue, labels)

    def stock(x: torch.Tensor) -> torch.Tensor:
        seed_generators(1)
        with torch.autocast(device.type, enabled=probe.autocast, dtype=torch.get_autocast_dtype(device.type)):
            return _loss(twin(x), epilogue, labels)

    refusal = difference(fused, stock, [hidden], list(twin.parameters()), probe.computed_in)
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
