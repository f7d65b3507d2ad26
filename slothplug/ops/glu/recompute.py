"""The product of a gated MLP is not saved for the backward of its last layer: the backward recomputes it.

A linear layer saves its input for the gradient of its weight or of its adapter. Of the three tensors of the MLP's width
that would be alive until the backward, the kernel saves two, gate and up, and the third follows from them in one pass
over memory. A step of 4 x 2048 tokens of Llama-3-8B's shape holds 43.4 GiB instead of 50.4, and the backward of a layer
reads and writes 0.7 GB more (docs/benchmarks/axolotl_step.md).

This is done only where the last layer is known to save its input unmodified: an ``nn.Linear``, or a LoRA layer that is
served and in the plain case, without hooks. Other modules may save a modified input, which we cannot detect.

Where the caller has set hooks on saved tensors (a checkpoint that is not reentrant, an offload), all three tensors are
saved, as in stock: these hooks decide what is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slothplug.ops.peft_lora.layer import LoraParts, read_lora
from slothplug.patching.private_class import stock_class
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal
from slothplug.patching.watch import UNWATCHED, Watch


class _Saved(NamedTuple):
    """A saved tensor and its version, which autograd does not compare where hooks pack the tensor."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Saved:
        # A leaf is saved itself: sharding engines give parameters other memory between forward and backward. Any other
        # tensor is detached: a layer's output that refers to its node would be kept alive by that node.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def checked(self) -> torch.Tensor:
        # Compiled autograd passes stand-ins, whose versions differ.
        if self.tensor._version != self.version and not torch.compiler.is_compiling():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}], which a gated MLP's last layer needs, is at version "
                f"{self.tensor._version}; expected version {self.version} instead."
            )
        return self.tensor


class _Recomputed(NamedTuple):
    """Stands for the product: its operands, and the shape in which it was saved."""

    operands: tuple[_Saved | None, ...]
    shape: torch.Size


class Reader(NamedTuple):
    """A last layer that saves its input unmodified, for as long as its adapter is the active one.

    Attributes:
        adapter: what the LoRA layer names as active adapter; None for an ``nn.Linear``.
    """

    adapter: object


def bind_reader(last: nn.Module, watch: Watch) -> Reader | None:
    """The last layer as a reader; ``watch`` notes what the answer depends on. None where each call has to ask."""
    if stock_class(last) is nn.Linear:
        return Reader(None) if watch.unhooked(last) else None
    served: Served | None = last.__dict__.get(STATE)
    if served is None or served.op != "lora" or served.bind is None:
        return None
    plain_case = not isinstance(served.bind(last, served, watch), Refusal)
    return Reader(last.__dict__["_active_adapter"]) if plain_case else None


def saves_its_input(last: nn.Module, reader: Reader | None) -> bool:
    """Whether the last layer saves its input unmodified in this call. ``reader`` is what was bound for it."""
    if reader is None:
        return _saves_unmodified(last)
    if reader.adapter is None:
        return True
    own = last.__dict__
    plain_case = not own["_disable_adapters"] and not own["merged_adapters"]
    return plain_case and own["_active_adapter"] is reader.adapter


def recompute_product(
    product: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kernel: Callable[..., torch.Tensor]
) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``product``, which is ``kernel(gate, up)``, is not saved for a backward but recomputed there.

    ``product`` is saved as ever where nothing else keeps gate and up.
    """
    operands_are_kept = gate.requires_grad and (up is None or up.requires_grad)
    if not operands_are_kept or not torch.is_grad_enabled() or _others_have_hooks():
        return contextlib.nullcontext()
    operands = (_Saved.of(gate), None if up is None else _Saved.of(up))
    # Saved tensors keep both functions below, which therefore must not keep the product.
    identity, device = _identity(product), product.device.type
    autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def pack(tensor: torch.Tensor) -> _Saved | _Recomputed:
        if type(tensor) is torch.Tensor and tensor.is_contiguous() and _identity(tensor) == identity:
            return _Recomputed(operands, tensor.shape)
        return _Saved.of(tensor)

    def unpack(packed: _Saved | _Recomputed) -> torch.Tensor:
        if isinstance(packed, _Saved):
            return packed.checked()
        read = (None if operand is None else operand.checked() for operand in packed.operands)
        dtype, enabled = autocast
        with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled):
            return kernel(*read).view(packed.shape)

    return saved_tensors_hooks(pack, unpack)


def _saves_unmodified(last: nn.Module) -> bool:
    if stock_class(last) is nn.Linear:
        return UNWATCHED.unhooked(last)
    served: Served | None = last.__dict__.get(STATE)
    return served is not None and served.op == "lora" and isinstance(read_lora(last), LoraParts)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for dense tensors of the same memory and version, whatever their shapes."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version


def _others_have_hooks() -> bool:
    """True also where hooks are forbidden."""
    state = torch._C._autograd
    forbidden = state._saved_tensors_hooks_get_disabled_error_message() is not None
    return forbidden or state._top_saved_tensors_default_hooks(False) is not None
