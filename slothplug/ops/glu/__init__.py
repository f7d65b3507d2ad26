"""Gated MLP sites: modules that compute ``down(act(gate(x)) * up(x))``, with gate and up apart or packed in one layer.

The operation ``glu`` is the product between the linear layers. A kernel that a plugin offers for it is called as

    kernel(gate, up, activation=...)                  gate, up: [..., I]             -> [..., I]
    kernel(gate_up, None, activation=..., layout=...) gate_up: [..., 2 I], packed    -> [..., I]

with ``activation`` one of ``kernels.glu.ACTIVATIONS`` and ``layout`` one of ``kernels.glu.LAYOUTS``; it is
differentiable in its tensors and returns their dtype. The linear layers are called as modules, in stock's order:
adapters, quantised layers, hooks and sharding stay theirs, and no weight is read here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import torch
from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.kernels.backend import Backend
from slothplug.kernels.glu import DTYPES, Activation, Layout, glu, glu_packed
from slothplug.ops.glu.forward import bind, fast_glu
from slothplug.ops.glu.probe import prove
from slothplug.ops.glu.recognition import Identified, identify
from slothplug.ops.glu.structure import key_of, shapes_of, weight_dtypes
from slothplug.patching.predicates import device_of, dtype_of, why_not_touchable
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.plugins import kernel_for
from slothplug.settings import Settings

NAME = "glu"


@hookimpl
def slothplug_operations() -> list[Operation]:
    return [
        Operation(
            NAME,
            "Activation and product of a gated MLP in one pass, forward and backward",
            competitors=("liger_kernel.transformers.swiglu", "liger_kernel.transformers.geglu"),
        )
    ]


@hookimpl
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    if operation != NAME or dtype not in DTYPES:
        return None
    return Kernel.on_backend(NAME, _glu, device, settings)


def _glu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    *,
    activation: Activation,
    layout: Layout = "gate_up",
    backend: Backend,
) -> torch.Tensor:
    if up is None:
        return glu_packed(gate, activation=activation, layout=layout, backend=backend)
    return glu(gate, up, activation=activation, backend=backend)


@hookimpl
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterator[Site | Left]:
    identified: dict[Hashable, Identified | Refusal] = {}
    for name, module in model.named_modules():
        shapes = shapes_of(module)
        if not shapes:
            continue
        device, dtype = device_of(module), dtype_of(module)
        if device.type == "meta":
            yield Left(NAME, name, module, Refusal("its weights are on the meta device"))
            continue
        key = key_of(module)
        if key not in identified:
            identified[key] = identify(module, shapes)
        found = identified[key]
        kernel = kernel_for(NAME, device, dtype, settings)
        untouchable = why_not_touchable(module)
        if isinstance(found, Refusal):
            if found.reason:
                yield Left(NAME, name, module, untouchable or found)
        elif untouchable:
            yield Left(NAME, name, module, untouchable)
        elif len(weight_dtypes(module)) > 1:
            yield Left(NAME, name, module, Refusal("its linear layers have weights of different dtypes"))
        elif kernel is None:
            yield Left(NAME, name, module, Refusal(f"no kernel for {device.type} and {dtype}"))
        else:
            proof = partial(prove, module, found, kernel)
            yield Site(NAME, name, module, fast_glu, found.mlp, kernel, proof, (key, found.mlp, dtype), bind)
