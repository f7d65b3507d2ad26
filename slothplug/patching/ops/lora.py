"""LoRA sites: PEFT's ``lora.Linear`` on an ``nn.Linear``; siblings that share an input run in one autograd node.

What decides a call's result is asked on every call, since PEFT and its users change it between calls: the active
adapters, ``disable_adapter``, merging, scaling, hooks, the types of all parts. Whatever is not the plain case is
answered by the original forward, and the report counts why.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.hookspecs import hookimpl
from slothplug.kernels.lora import DTYPES, Operand, Precision, lora_linear
from slothplug.patching.call import current_call
from slothplug.patching.casts import Casts
from slothplug.patching.private_class import is_patched, stock_class
from slothplug.patching.proof import difference, probe_rows, seed_generators
from slothplug.patching.recording import why_recorded
from slothplug.patching.siblings import Group, Kept, Member, collect, groups_in, keep, shareable, state_now
from slothplug.patching.sites import (
    STATE,
    Calls,
    Kernel,
    Left,
    Operation,
    Served,
    Site,
    device_of,
    dtype_of,
    why_not_touchable,
)
from slothplug.patching.twin import twin
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "lora"
PEFT_LAYERS = "peft.tuners.lora.layer"

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_DROPOUTS = frozenset({nn.Identity, nn.Dropout})

# A twin's sizes, all different.
SMALL_IN, SMALL_OUT, SMALL_RANK = 16, 24, 4
SIBLINGS = 3


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [Operation(NAME, "LoRA linear layers, those that share an input together, in one autograd node")]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The same code on every device: the work is matrix products, which the vendor's library does."""
    if operation != NAME or dtype not in DTYPES:
        return None
    name = NAME if settings.lora_precision == "peft" else f"{NAME}, adapters cast to the input's dtype"
    return Kernel(name, "torch", partial(lora_linear, precision=settings.lora_precision))


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    layers = sys.modules.get(PEFT_LAYERS)
    if layers is None:
        return
    servable: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, layers.LoraLayer):
            continue
        left = _why_left(module, layers.Linear)
        if left:
            yield Left(NAME, name, module, left.reason, left.excused)
        else:
            servable[name] = module
    # A group's members are patched together: one that an earlier patch serves keeps the group that it has.
    members = groups_in({name: module for name, module in servable.items() if not is_patched(module)}, model)
    for name, module in servable.items():
        device, dtype = device_of(module), dtype_of(module)
        kernel = kernel_for(NAME, device, dtype, settings)
        if kernel is None:
            yield Left(NAME, name, module, f"no kernel for {device.type} and {dtype}")
            continue
        yield Site(
            NAME,
            name,
            module,
            fast_lora,
            members.get(module),
            kernel,
            partial(prove, module, kernel, settings.lora_precision),
            _key(module),
        )


class _Reason(NamedTuple):
    reason: str
    excused: bool = False


def _why_left(module: Any, linear: type[nn.Module]) -> _Reason | None:
    """Why a LoRA layer cannot be served in any state that it may come into later."""
    base = module.base_layer
    if stock_class(base) is not nn.Linear:
        return _Reason(f"its base layer is a {type(base).__name__}; only nn.Linear is fused", excused=True)
    if stock_class(module) is not linear:
        return _Reason(f"a {stock_class(module).__name__} of {stock_class(module).__module__}", excused=True)
    if module.fan_in_fan_out or getattr(module, "is_target_conv_1d_layer", False):
        return _Reason("its weight is stored transposed (fan_in_fan_out)", excused=True)
    name = _probed_adapter(module)
    if name is None:
        variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        if variants:
            return _Reason(f"its adapter is no plain LoRA ({', '.join(variants)})", excused=True)
        return _Reason("it has no adapter")
    parts = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(parts[0]) is not nn.Linear or type(parts[1]) is not nn.Linear or type(parts[2]) not in _DROPOUTS:
        return _Reason(f"its adapter is made of {', '.join(type(part).__name__ for part in parts)}")
    for part in (base, *parts):
        if reason := why_not_touchable(part):
            return _Reason(f"{type(part).__name__} in it: {reason}")
    return None


def _probed_adapter(module: Any) -> str | None:
    """The adapter that stands for the layer at patch time: an active one if possible, and never a variant."""
    names = [name for name in (*module.active_adapters, *module.lora_A) if name in module.lora_A]
    return next((name for name in names if name not in module.lora_variant), None)


class Adapted(NamedTuple):
    """What a call reads from a LoRA layer in the plain case."""

    operand: Operand
    dropout: nn.Module | None
    """The dropout to be called, or None where it does nothing."""
    factors: tuple[nn.Module, nn.Module]
    """The layers that hold A and B."""


def fast_lora(module: nn.Module, served: Served, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of the LoRA layer's forward."""
    if args or kwargs:
        return served.fall_back(module, "called with more than the input", x, *args, **kwargs)
    if reason := why_recorded():
        return served.fall_back(module, reason, x)
    if type(x) not in _PLAIN:
        return served.fall_back(module, f"input of type {type(x).__name__}", x)
    found = adapted(module)
    if isinstance(found, str):
        return served.fall_back(module, found, x)
    operand, dropout, _ = found
    member: Member | None = served.params
    state: tuple[Any, ...] = ()
    alone = True
    # nn.DataParallel's replicas are no members of the group that their original is in.
    here = x.device.type == served.device_type
    if here and member is not None and dropout is None and member.module() is module and shareable(x):
        state = state_now(served.owner, x.device)
        kept = collect(member, x, _inputs(operand, state), state)
        if isinstance(kept, Kept):
            served.calls.collected += 1
            return served.calls.serve(kept.output)
        alone = kept
    reason = _why_not(x, operand, served.device_type)
    if reason is not None:
        return served.fall_back(module, reason, x)
    if dropout is not None:
        # The mask is drawn as PEFT draws it: by the layer's own module, from an input in the adapter's dtype, in turn.
        dropped = dropout(x if x.dtype is operand.a.dtype else x.to(operand.a.dtype))
        lowered = _lowered(served, (found,))
        return served.calls.serve(served.kernel(x, (operand,), adapter_input=dropped, lowered=lowered)[0])
    if alone or member is None:
        return served.calls.serve(served.kernel(x, (operand,), lowered=_lowered(served, (found,)))[0])
    return served.calls.serve(_for_siblings(member, served, x, found, state))


def _lowered(served: Served, parts: Sequence[Adapted]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """A and B of each part in autocast's dtype; None where they are multiplied in their own, or outside of a patch."""
    if served.owner is None or not torch.is_autocast_enabled(served.device_type):
        return None
    dtype = torch.get_autocast_dtype(served.device_type)
    if parts[0].operand.a.dtype is dtype:
        return None
    casts: Casts = served.owner.casts  # type: ignore[attr-defined]
    call = current_call(served.owner)
    return [(casts.weight(a, dtype, call), casts.weight(b, dtype, call)) for a, b in (p.factors for p in parts)]


def _for_siblings(
    member: Member, served: Served, x: torch.Tensor, own: Adapted, state: tuple[Any, ...]
) -> torch.Tensor:
    """The member's output, computed with those of its siblings that are in the plain case."""
    parts, partners = [own], []
    for index, sibling in member.others():
        sibling_state = sibling.__dict__.get(STATE)
        if sibling_state is None:
            continue
        found = adapted(sibling)
        if isinstance(found, str) or found.dropout is not None or found.operand.a.dtype is not own.operand.a.dtype:
            continue
        if _why_not(x, found.operand, served.device_type) is None:
            parts.append(found)
            partners.append((index, sibling_state.calls))
    operands = [part.operand for part in parts]
    output, *others = served.kernel(x, operands, lowered=_lowered(served, parts))
    kept = {
        index: Kept(y, _inputs(o, state), calls)
        for (index, calls), y, o in zip(partners, others, operands[1:], strict=True)
    }
    keep(member, x, state, kept)
    return output


def _inputs(operand: Operand, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells whether a kept output is still that of ``operand``.

    Outside a call of the model and outside backward nothing bounds the time between two siblings' calls, so there the
    versions of the weights are compared as well.
    """
    if state[0] != -1:
        return operand
    return (*operand, *(None if t.is_inference() else t._version for t in (operand.weight, operand.a, operand.b)))


def adapted(module: nn.Module) -> Adapted | str:
    """The parts of a LoRA layer in the plain case, or the reason why this is not the plain case.

    Reads ``__dict__`` and ``_modules`` directly: attribute look-ups of nn.Module would cost more than all the rest.
    """
    own = module.__dict__
    if own["_disable_adapters"]:
        return "adapters are disabled"
    if own["merged_adapters"]:
        return "the adapter is merged"
    modules = own["_modules"]
    firsts = modules["lora_A"]._modules
    name = own["_active_adapter"]
    if type(name) is not str:
        names = [each for each in name if each in firsts]
        if len(names) != 1:
            return "no adapter is active" if not names else "several adapters are active"
        name = names[0]
    elif name not in firsts:
        return "no adapter is active"
    if name in own["lora_variant"]:
        return f"the adapter is no plain LoRA ({type(own['lora_variant'][name]).__name__})"
    base, first = modules["base_layer"], firsts[name]
    second, dropout = modules["lora_B"]._modules[name], modules["lora_dropout"]._modules[name]
    if type(first) is not nn.Linear or type(second) is not nn.Linear:
        return "a part of it is not an nn.Linear"
    # An output layer that was patched before PEFT wrapped it is one still.
    if type(base) is not nn.Linear and stock_class(base) is not nn.Linear:
        return "a part of it is not an nn.Linear"
    if _hooked(own) or _hooked(base.__dict__) or _hooked(first.__dict__) or _hooked(second.__dict__):
        return "it or a part of it has hooks, or a forward set by somebody else"
    active_dropout = None
    if type(dropout) is nn.Dropout:
        if dropout.__dict__["training"] and dropout.__dict__["p"] > 0:
            active_dropout = dropout
    elif type(dropout) is not nn.Identity:
        return f"its dropout is a {type(dropout).__name__}"
    if active_dropout is None and _hooked(dropout.__dict__):
        return "its dropout has hooks"
    if not own.get("cast_input_dtype_enabled", True):
        return "casting of the adapter's input is switched off"
    if torch_module._has_any_global_hook():
        return "hooks on every module are set"
    return _operand(base, first, second, own["scaling"][name], active_dropout)


def _operand(
    base: nn.Module, first: nn.Module, second: nn.Module, scaling: object, dropout: nn.Module | None
) -> Adapted | str:
    base_parameters, second_parameters = base._parameters, second._parameters
    weight: Any = base_parameters.get("weight")
    a: Any = first._parameters.get("weight")
    b: Any = second_parameters.get("weight")
    bias, b_bias = base_parameters.get("bias"), second_parameters.get("bias")
    if type(weight) not in _PLAIN or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return "its weights are sharded, quantised or elsewhere"
    if (bias is not None and type(bias) not in _PLAIN) or (b_bias is not None and type(b_bias) not in _PLAIN):
        return "its biases are sharded, quantised or elsewhere"
    if first._parameters.get("bias") is not None:
        return "the adapter's first layer has a bias"
    if not isinstance(scaling, (float, int)):
        return f"its scaling is a {type(scaling).__name__}"
    return Adapted(Operand(weight, bias, a, b, scaling, b_bias), dropout, (first, second))


def _hooked(own: dict[str, Any]) -> bool:
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def _why_not(x: torch.Tensor, operand: Operand, device_type: str) -> str | None:
    """Why these tensors go the original way."""
    weight, a = operand.weight, operand.a
    device = x.device
    if device.type != device_type or weight.device != device or a.device != device:
        return "input and weights are not on the device that was patched for"
    if not weight.shape[-1] == a.shape[-1] == x.shape[-1]:
        return "its weights are partitioned, or do not fit the input"
    if x.dtype not in DTYPES or weight.dtype not in DTYPES or a.dtype not in DTYPES or operand.b.dtype is not a.dtype:
        return f"input of {x.dtype}, base layer of {weight.dtype}, adapter of {a.dtype}"
    if not torch.is_autocast_enabled(device_type):
        return None if x.dtype is weight.dtype else f"input of {x.dtype} outside autocast, base layer of {weight.dtype}"
    if a.dtype is not torch.float32 and a.dtype is not torch.get_autocast_dtype(device_type) and a.dtype is not x.dtype:
        return f"adapter of {a.dtype} under autocast in another dtype"
    return None


def _key(module: Any) -> Hashable:
    """All that decides what a twin of ``module`` computes."""
    name = _probed_adapter(module)
    dropout = module.lora_dropout[name]
    return (
        stock_class(module),
        module.base_layer.bias is None,
        module.lora_B[name].bias is None,
        getattr(dropout, "p", 0.0),
        module.scaling[name],
        dtype_of(module.base_layer),
        module.lora_A[name].weight.dtype,
    )


def prove(module: Any, kernel: Kernel, precision: Precision) -> str | None:
    """Compares fast and stock forward on small twins: in float32, in the module's dtypes, under autocast.

    A layer alone has the module's own dropout. Siblings have none, since layers with a mask each share no node; they
    are compared with factors that the kernel casts and with factors that a patched model has cast together.
    """
    device = device_of(module)
    lower = torch.get_autocast_dtype(device.type)
    name = _probed_adapter(module)
    assert name is not None  # such a module is no site
    dtypes = dtype_of(module.base_layer), module.lora_A[name].weight.dtype
    for base, adapter, autocast in (
        (torch.float32, torch.float32, False),
        (*dtypes, False),
        (*dtypes, True),
    ):
        computed_in = lower if autocast else base if precision == "compute" else None
        alone, *siblings = (small_twin(module, name, base, adapter, number) for number in range(1 + SIBLINGS))
        for doubles, owner in (([alone], None), (siblings, None), (siblings, _ProbeOwner())):
            x = probe_rows(SMALL_IN, base, device)
            with torch.autocast(device.type, lower, enabled=autocast):
                reason = _differ(doubles, owner, kernel, x, computed_in)
            if reason:
                which = "siblings, " if doubles is siblings else ""
                return f"{which}base {base}, adapter {adapter}, autocast {'on' if autocast else 'off'}: {reason}"
    return None


class _ProbeOwner:
    """What siblings of a patched model find at their owner."""

    def __init__(self) -> None:
        self.casts = Casts()


def _differ(
    doubles: Sequence[nn.Module], owner: object, kernel: Kernel, x: torch.Tensor, computed_in: torch.dtype | None
) -> str | None:
    """Why ``doubles``, of which several are siblings, do not compute on ``x`` what they do in stock."""
    calls = Calls()
    group = Group(doubles)
    for index, double in enumerate(doubles):
        member = Member(group, index) if len(doubles) > 1 else None
        double.__dict__[STATE] = Served(
            NAME, "", member, kernel.function, x.device.type, type(double).forward, owner, calls
        )

    def fast(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [fast_lora(double, double.__dict__[STATE], x) for double in doubles]

    def stock(x: torch.Tensor) -> list[torch.Tensor]:
        seed_generators(1)
        return [double(x) for double in doubles]

    weights = [parameter for double in doubles for parameter in double.parameters()]
    if reason := difference(fast, stock, [x], weights, computed_in):
        return reason
    if calls.collected != len(doubles) - 1:
        return "not served: siblings did not share a node"
    return next((f"not served: {why}" for why in calls.fallbacks), None)


def small_twin(module: Any, name: str, base: torch.dtype, adapter: torch.dtype, number: int = 0) -> nn.Module:
    """A LoRA layer of the module's class and configuration with small random parts; B is not zero.

    Every ``number`` has other sizes; from 1 on they are siblings' twins: without dropout, the first with a bias.
    """
    device = device_of(module)
    dropout = nn.Identity() if number else type(module.lora_dropout[name])(getattr(module.lora_dropout[name], "p", 0.0))
    size_out, rank = SMALL_OUT + 4 * number, SMALL_RANK + number

    def linear(size_in: int, size_out: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
        return nn.Linear(size_in, size_out, bias=bias, device=device, dtype=dtype)

    second = linear(rank, size_out, module.lora_B[name].bias is not None, adapter)
    double = twin(
        module,
        base,
        {
            "base_layer": linear(SMALL_IN, size_out, number == 1 or module.base_layer.bias is not None, base),
            "lora_A": nn.ModuleDict({name: linear(SMALL_IN, rank, False, adapter)}),
            "lora_B": nn.ModuleDict({name: second}),
            "lora_dropout": nn.ModuleDict({name: dropout}),
        },
    )
    double.__dict__.update(_disable_adapters=False, merged_adapters=[], _active_adapter=name, training=True)
    return double
