"""The product of a gated MLP is not kept for the backward of its last layer: it is made again from gate and up.

A linear layer keeps its input for its weight's gradient, or its adapter's. Of the three tensors of the MLP's width that
would be alive until the backward, the kernel keeps two, gate and up, and the third follows from them in one pass over
memory. A step of 4 x 2048 tokens of Llama-3-8B's shape holds 43.4 GiB instead of 50.4, and a layer's backward reads and
writes 0.7 GB more (docs/benchmarks/axolotl_step.md).

Only where the last layer is known to save its input as it was given: an ``nn.Linear``, or a LoRA layer that is served
and in the plain case, without hooks. What other code does to its input before it saves it, no version counter tells.

Whoever has hooks on saved tensors of his own (a checkpoint that is not reentrant, an offload) gets all three, as in
stock: he decides then what is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slothplug.ops.peft_lora.layer import LoraParts, read_lora
from slothplug.patching.predicates import hooked
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import STATE, Served


class _Kept(NamedTuple):
    """A saved tensor that is kept, and its version: autograd compares none where there are hooks."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        # A leaf as itself, for engines that shard give parameters other memory between forward and backward. All else
        # detached: a layer's output that knew its node would be kept alive by that node.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def checked(self) -> torch.Tensor:
        # Compiled autograd shows stand-ins.
        if self.tensor._version != self.version and not torch.compiler.is_compiling():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}], which a gated MLP's last layer needs, is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


class _Product(NamedTuple):
    """What stands for the product: its operands, and the shape in which it was saved."""

    operands: tuple[_Kept | None, ...]
    shape: torch.Size


def not_kept(
    product: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    kernel: Callable[..., torch.Tensor],
    reader: nn.Module,
) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``reader`` does not save ``product``, which is ``kernel(gate, up)``, but makes it again.

    It is saved as ever where nothing else keeps gate and up.
    """
    operands_are_kept = gate.requires_grad and (up is None or up.requires_grad)
    if not operands_are_kept or not torch.is_grad_enabled() or _others_have_hooks() or not _saves_as_given(reader):
        return contextlib.nullcontext()
    operands = (_Kept.of(gate), None if up is None else _Kept.of(up))
    # Saved tensors keep both functions below, which therefore must not keep the product.
    identity, device = _identity(product), product.device.type
    autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def pack(tensor: torch.Tensor) -> _Kept | _Product:
        if type(tensor) is torch.Tensor and tensor.is_contiguous() and _identity(tensor) == identity:
            return _Product(operands, tensor.shape)
        return _Kept.of(tensor)

    def unpack(packed: _Kept | _Product) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return packed.checked()
        read = (None if operand is None else operand.checked() for operand in packed.operands)
        dtype, enabled = autocast
        with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled):
            return kernel(*read).view(packed.shape)

    return saved_tensors_hooks(pack, unpack)


def _saves_as_given(reader: nn.Module) -> bool:
    if stock_class(reader) is nn.Linear:
        return not hooked(reader)
    served: Served | None = reader.__dict__.get(STATE)
    return served is not None and served.op == "lora" and isinstance(read_lora(reader), LoraParts)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for dense tensors that are the same memory in the same state, whatever their shapes."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version


def _others_have_hooks() -> bool:
    """True also where hooks are forbidden."""
    state = torch._C._autograd
    forbidden = state._saved_tensors_hooks_get_disabled_error_message() is not None
    return forbidden or state._top_saved_tensors_default_hooks(False) is not None
