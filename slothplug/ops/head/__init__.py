"""The output head: where only the loss reads the logits, they are never held whole (``ops.head.lazy_logits``).

The operation ``head`` is linear + cross-entropy. A kernel that a plugin offers for it has the signature of
``kernels.linear_cross_entropy.linear_cross_entropy`` without ``backend``.

A head that PEFT put a LoRA adapter on is served too (``ops.adapted_head``); the operation ``lora`` then leaves it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.kernels.linear_cross_entropy import LowRank, linear_cross_entropy
from slothplug.ops.head import adapter as adapted_head
from slothplug.ops.head.adapter import Parts
from slothplug.ops.head.label_count import Bound, LabelCounts
from slothplug.ops.head.lazy_logits import put_off
from slothplug.ops.head.lazy_value import Product
from slothplug.ops.head.statistics_policy import Readers
from slothplug.ops.peft_lora.layer import Precision, key_of
from slothplug.patching.forward_context import current_forward
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import seed_generators
from slothplug.patching.predicates import OTHER_ARGUMENTS, device_of, dtype_of, plain, why_not_input
from slothplug.patching.private_class import is_patched, stock_class
from slothplug.patching.proof import difference
from slothplug.patching.served import Calls, Served
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.patching.transforms import why_not_now
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "head"
_COMPETITORS = ("liger_kernel.transformers.model", "cut_cross_entropy")

# A probe's head: odd sizes, and logits of a few units at most, so that softmax does not magnify rounding.
_PROBE_HIDDEN, _PROBE_VOCABULARY, _PROBE_SCALES = 48, 97, (1e-3, 0.1, 1.0)
_PROBE_EPILOGUES: tuple[tuple[EpilogueStep, ...], ...] = (
    (),
    (("cast", torch.float32),),
    (("mul", 0.0625), ("cast", torch.float32)),
    (("div", 30.0), ("tanh", None), ("mul", 30.0), ("cast", torch.float32)),
)


@dataclass(frozen=True)
class Head:
    """What a served head needs beside its weights."""

    chunk_bytes: int
    precision: Precision = "peft"
    """Of an adapter on the head; as the setting ``lora_precision``."""
    bound: Bound = field(default_factory=Bound)
    readers: Readers = field(default_factory=Readers)


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME, "Output head and cross-entropy in chunks, without holding the logits", LabelCounts, _COMPETITORS
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME:
        return None
    return Kernel.on_backend("linear_cross_entropy", linear_cross_entropy, device, settings)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    names = {module: name for name, module in model.named_modules()}
    for head in _heads(model):
        if refusal := _refusal_of(head, model, settings):
            yield Left(NAME, names[head], head, refusal)
        elif (kernel := kernel_for(NAME, device_of(head), dtype_of(head), settings)) is None:
            yield Left(NAME, names[head], head, Refusal(f"no kernel for {device_of(head).type} and {dtype_of(head)}"))
        else:
            params = Head(settings.loss_chunk_mib * 2**20, settings.lora_precision)
            key: Hashable = (getattr(head, "bias", None) is not None, dtype_of(head))
            proof = partial(prove, head, kernel)
            if adapted_head.is_lora(head):
                key, proof = key_of(head), partial(prove_adapted, head, kernel, settings.lora_precision)
                if settings.lora_precision == "compute":
                    kernel = replace(kernel, name=f"{kernel.name}, adapter cast to the input's dtype")
            yield Site(NAME, names[head], head, fast_head, params, kernel, proof, key)


def fast_head(
    module: nn.Module, served: Served[Head, LabelCounts], hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Takes the place of the head's forward."""
    call = current_forward(served.context)
    if call is None or call.labels is None:
        return served.fall_back(module, Refusal("called without labels"), hidden, *args, **kwargs)
    if args or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, hidden, *args, **kwargs)
    if not is_patched(module) and not _stays_gathered(module):
        return served.fall_back(module, Refusal("its weights are freed when its call ends"), hidden)
    max_valid = partial(served.spec.bound.max_valid, count=served.shared.of(call))
    product = product_of(module, served, hidden, max_valid)
    if isinstance(product, Refusal):
        return served.fall_back(module, product, hidden)
    call.at_end.append(lambda: product.close(completed=not call.failed))
    return put_off(product)


def product_of(
    module: nn.Module,
    served: Served[Head, LabelCounts],
    hidden: torch.Tensor,
    max_valid: Callable[[torch.Tensor, int], int | None],
) -> Product | Refusal:
    """What the head multiplies in this call, or why its original forward is to answer it."""
    found = _parts_of(module)
    if isinstance(found, Refusal):
        return found
    weight, bias, adapter = found
    if weight is None:
        return Refusal("it has no weight of its own")
    refusal = _why_not(module, hidden, weight, bias, served.device_type)
    if refusal is None and adapter is not None:
        refusal = adapted_head.why_not_adapter(adapter, weight, hidden)
    if refusal is not None:
        return refusal
    low_rank: LowRank | None = None
    if adapter is not None:
        # Nothing refuses from here on: dropout draws its mask once.
        low_rank = adapted_head.low_rank_of(adapter, hidden, served.spec.precision)
    dtype, head = _product_dtype(hidden), served.spec
    return Product(
        hidden, weight, bias, dtype, served.kernel, head.chunk_bytes, served.calls, max_valid, head.readers, low_rank,
        partial(adapted_head.merged, module) if adapted_head.is_lora(module) else None,
    )  # fmt: skip


def _parts_of(module: nn.Module) -> Parts | Refusal:
    if adapted_head.is_lora(module):
        return adapted_head.parts_of(module)
    return Parts(module._parameters.get("weight"), module._parameters.get("bias"))


def _why_not(
    module: nn.Module, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device_type: str
) -> Refusal | None:
    if reason := why_not_now():
        return reason
    if module._backward_hooks or module._backward_pre_hooks:
        return Refusal("it has backward hooks")
    if reason := why_not_input(hidden, device_type):
        return reason
    if not _usable(weight, hidden) or not (bias is None or _usable(bias, hidden)):
        return Refusal("weight is sharded, elsewhere or of another dtype")
    return None


def _stays_gathered(module: nn.Module) -> bool:
    """Whether FSDP2, which put a class of its own above ours, leaves the weights whole until the backward."""
    get_state = getattr(module, "_get_fsdp_state", None)
    group = getattr(get_state(), "_fsdp_param_group", None) if get_state is not None else None
    return group is not None and getattr(group, "post_forward_mesh_info", group) is None


def _usable(parameter: torch.Tensor, hidden: torch.Tensor) -> bool:
    if not plain(parameter) or parameter.device != hidden.device or hasattr(parameter, "ds_id"):
        return False
    if parameter.numel() == 0:
        return False
    return parameter.dtype is hidden.dtype or (
        _product_dtype(hidden) is not hidden.dtype and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of ``F.linear(hidden, ...)``: autocast's where it is on; it leaves float64 alone."""
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _heads(model: nn.Module) -> list[nn.Module]:
    """The model's output head; where PEFT keeps trainable copies of it, those."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return []
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(head, peft.utils.ModulesToSaveWrapper):
        return list(head.modules_to_save.values())
    return [head]


def _refusal_of(head: nn.Module, model: nn.Module, settings: Settings) -> Refusal | None:
    """Why the head cannot be served, or should not be."""
    base = stock_class(head)
    if adapted_head.is_lora(head):
        if refusal := adapted_head.why_not_plain_lora(head):
            return refusal
    elif base.__module__.startswith("peft."):
        return Refusal(f"an adapter is on the head ({base.__name__}): its own weight is not all that it multiplies by")
    elif base is not nn.Linear:
        return Refusal(f"the head is {base.__module__}.{base.__qualname__}, not a plain linear layer")
    if settings.keep_logits:
        return Refusal("keep_logits is set", excused=True)
    if trl_computes_the_loss(model):
        return Refusal("TRL's own fused head computes the loss of this model", excused=True)
    return None


def trl_computes_the_loss(model: nn.Module) -> bool:
    """Whether TRL put its fused head on the model: it reads the head's weight and never calls the head."""
    # accelerate wraps a model's forward in autocast and keeps the one that was there.
    forwards = [getattr(model.__dict__.get(name), "__func__", None) for name in ("forward", "_original_forward")]
    return any(isinstance(f, FunctionType) and f.__globals__.get("__name__", "").startswith("trl.") for f in forwards)


def prove(head: nn.Module, kernel: Kernel) -> Refusal | None:
    """Compares the fused loss with a small head's stock loss, in float32 and in the head's own dtype."""
    for dtype in dict.fromkeys((torch.float32, dtype_of(head))):
        for epilogue in _PROBE_EPILOGUES:
            if refusal := _probe(dtype, device_of(head), getattr(head, "bias", None) is not None, epilogue, kernel):
                return refusal.within(f"in {dtype}, epilogue {[name for name, _ in epilogue]}")
    return None


def _probe(
    dtype: torch.dtype, device: torch.device, has_bias: bool, epilogue: tuple[EpilogueStep, ...], kernel: Kernel
) -> Refusal | None:
    small = nn.Linear(_PROBE_HIDDEN, _PROBE_VOCABULARY, has_bias, device=device, dtype=dtype)
    scales = torch.tensor(_PROBE_SCALES * 2, device=device).view(1, -1, 1)
    hidden = (torch.randn(1, scales.numel(), _PROBE_HIDDEN, device=device) * scales).to(dtype).requires_grad_()
    labels = torch.randint(_PROBE_VOCABULARY, (scales.numel(),), device=device)
    labels[2] = -100
    calls = Calls()

    def fused(x: torch.Tensor) -> torch.Tensor:
        max_valid = partial(Bound().max_valid, count=None)
        product = Product(x, small.weight, small.bias, dtype, kernel.function, 2**20, calls, max_valid, Readers())
        return _loss(put_off(product), epilogue, labels)

    def stock(x: torch.Tensor) -> torch.Tensor:
        return _loss(F.linear(x, small.weight, small.bias), epilogue, labels)

    refusal = difference(fused, stock, [hidden], list(small.parameters()))
    return refusal or (Refusal("the loss was not fused") if calls.fallbacks else None)


def prove_adapted(head: nn.Module, kernel: Kernel, precision: Precision) -> Refusal | None:
    """The same for a head with a LoRA adapter: its twins' fused loss, and PEFT's forward with the stock loss."""
    for probe in adapted_head.probes(head, _PROBE_SCALES):
        for epilogue in _PROBE_EPILOGUES:
            if refusal := _probe_adapted(probe, epilogue, kernel, precision):
                return refusal.within(f"{probe.words}, epilogue {[name for name, _ in epilogue]}")
    return None


def _probe_adapted(
    probe: adapted_head.Probe, epilogue: tuple[EpilogueStep, ...], kernel: Kernel, precision: Precision
) -> Refusal | None:
    double: Any = probe.twin
    hidden, device = probe.hidden, probe.hidden.device
    labels = torch.randint(double.base_layer.out_features, hidden.shape[:-1], device=device).flatten()
    labels[2] = -100
    spec, calls, context = Head(2**20, precision), Calls(), ModelContext(Settings())
    max_valid = partial(spec.bound.max_valid, count=None)
    served = Served(NAME, "", spec, kernel.function, device.type, type(double).forward, context, LabelCounts(), calls)

    def fused(x: torch.Tensor) -> torch.Tensor:
        seed_generators(1)  # for one mask
        with torch.autocast(device.type, enabled=probe.autocast, dtype=torch.get_autocast_dtype(device.type)):
            product = product_of(double, served, x, max_valid)
            if isinstance(product, Refusal):
                return _loss(served.fall_back(double, product, x), epilogue, labels)
            return _loss(put_off(product), epilogue, labels)

    def stock(x: torch.Tensor) -> torch.Tensor:
        seed_generators(1)
        with torch.autocast(device.type, enabled=probe.autocast, dtype=torch.get_autocast_dtype(device.type)):
            return _loss(double(x), epilogue, labels)

    refusal = difference(fused, stock, [hidden], list(double.parameters()), probe.computed_in)
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
