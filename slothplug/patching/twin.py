"""Twins: stand-ins of a module's own class and configuration on which a probe may do what it likes.

What a twin shows holds for every module of the same class and attributes, for as long as these stay
(``patching.fingerprint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from slothplug.patching.private_class import stock_class
from slothplug.patching.served import STATE

Module = TypeVar("Module", bound=nn.Module)


def twin(module: Module, dtype: torch.dtype, children: Mapping[str, nn.Module] | None = None) -> Module:
    """A module of the stock class of ``module`` with its attributes, fresh random weights, no hooks and no ``forward``.

    Nor is it compiled: what ``module.compile()`` leaves on an instance calls that instance.

    Methods of the original among its attributes become the twin's. Own parameters have the original's shapes and
    devices, ``dtype``, and values drawn around 1 (so that a norm's weight matters); buffers are copied. Children are
    shared unless ``children`` names a replacement. Nothing that the twin does to its parameters, buffers or flags
    reaches the original.
    """
    double: Any = object.__new__(stock_class(module))
    for key, value in module.__dict__.items():
        if key not in (STATE, "forward", "_compiled_call_impl"):
            of_original = isinstance(value, MethodType) and value.__self__ is module
            double.__dict__[key] = MethodType(value.__func__, double) if of_original else value
    for key, value in nn.Module().__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            double.__dict__[key] = type(value)()
    double.__dict__["_parameters"] = {
        name: None if parameter is None else _random_like(parameter, dtype)
        for name, parameter in module._parameters.items()
    }
    double.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()
    }
    double.__dict__["_modules"] = {**module._modules, **(children or {})}
    return double


def _random_like(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    values = torch.empty(parameter.shape, device=parameter.device).uniform_(0.5, 1.5)
    return nn.Parameter(values.to(dtype))
