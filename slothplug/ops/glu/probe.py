"""The probe of a gated MLP: the kernel between the layers of a twin, against the twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.ops.glu.gated_mlp import GatedMLP, gate_and_up
from slothplug.ops.glu.recognition import Identified
from slothplug.ops.glu.recompute import recompute_product
from slothplug.ops.glu.structure import recording_twin
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.proof import difference, probe_rows
from slothplug.patching.sites import Kernel, Refusal

# Gates and values of a float16 probe stay where their products are finite.
HALF_RANGE = 8.0


def prove(module: nn.Module, found: Identified, kernel: Kernel) -> Refusal | None:
    """Compares output, input gradient and weight gradients with a twin's, in float32 and in the module's dtype."""
    for dtype in dict.fromkeys((torch.float32, dtype_of(module))):
        double, _ = recording_twin(module, found.shape, training=True, dtype=dtype)
        x = probe_rows(found.shape.hidden, dtype, device_of(module))
        if dtype is torch.float16:
            x = x.detach().clamp(-HALF_RANGE, HALF_RANGE).requires_grad_()
        fast = partial(_with_kernel, double._modules, found.mlp, kernel.function)
        if refusal := difference(fast, double, [x], list(double.parameters())):
            return refusal.within(f"in {dtype}")
    return None


def _with_kernel(
    modules: Mapping[str, Any], mlp: GatedMLP, kernel: Callable[..., torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    gate, up = gate_and_up(modules, mlp, x)
    with_arguments = partial(kernel, **mlp.arguments())
    h = with_arguments(gate, up)
    with recompute_product(h, gate, up, with_arguments):
        return modules[mlp.down](h)
