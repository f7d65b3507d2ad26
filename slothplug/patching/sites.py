"""The nouns of a patch: operations, kernels, sites, and what a served module carries; and why one is not served.

Reasons are said in one way. A question named ``why_...`` or ``_why_not`` is answered by the reason, in words for the
report, or by None where there is none. What is looked for in a module is answered by what was found, or by a
``Refusal``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from slothplug.kernels.backend import choose_backend, why_not_triton
from slothplug.settings import Settings

STATE = "_slothplug"
"""Key in a served module's ``__dict__`` under which its ``Served`` lies."""


@dataclass(frozen=True)
class Operation:
    """A kind of computation that can be fused.

    Attributes:
        name: its word in ``ops``, ``skip_ops`` and the report.
        summary: what is fused, in a line; ``slothplug doctor`` prints it.
    """

    name: str
    summary: str


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation: a differentiable function of the operation's documented signature."""

    name: str
    backend: str
    function: Callable[..., Any]

    @classmethod
    def on_backend(
        cls, name: str, function: Callable[..., Any], device: torch.device, settings: Settings
    ) -> Kernel | None:
        """``function``, one of ``slothplug.kernels``, with the ``backend`` that the settings mean on ``device``.

        None where they name one that cannot serve the device.
        """
        backend = choose_backend(device) if settings.backend == "auto" else settings.backend
        if backend == "triton" and why_not_triton(device):
            return None
        return cls(name, backend, partial(function, backend=backend))


@dataclass
class Calls:
    """How often a site was asked, and what it answered with. Shared by a module and its copies."""

    served: int = 0
    backward: int = 0
    """Fused backward passes; counted only while ``count_backward`` is true, since it costs a hook a call."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls answered by the original forward, by reason."""
    count_backward: bool = False
    collected: int = 0
    """Served calls whose output a sibling's call had computed."""

    def serve(self, output: torch.Tensor) -> torch.Tensor:
        """Counts a served call and hands its output on."""
        self.served += 1
        if self.count_backward and output.grad_fn is not None:
            output.grad_fn.register_prehook(self._count_backward)
        return output

    def _count_backward(self, *_: object) -> None:
        self.backward += 1


class Served:
    """What a served module carries in its ``__dict__``: all that its fast forward needs beside the module itself.

    Attributes:
        op: the operation's name.
        name: the module's qualified name in the model that was patched.
        params: what the site's finder learnt about this module (style, eps, roles of children); owned by the op.
        kernel: the kernel's differentiable function.
        device_type: the device type that the kernel serves; other inputs go the original way.
        original: the stock class's ``forward``, unbound.
        owner: the patch this module belongs to; the same for every module of one patched model, another in its copies.
        calls: counters.
    """

    __slots__ = ("calls", "device_type", "kernel", "name", "op", "original", "owner", "params")

    def __init__(
        self,
        op: str,
        name: str,
        params: Any,
        kernel: Callable[..., Any],
        device_type: str,
        original: Callable[..., Any],
        owner: object,
        calls: Calls,
    ) -> None:
        self.op, self.name, self.params, self.kernel = op, name, params, kernel
        self.device_type, self.original, self.owner, self.calls = device_type, original, owner, calls

    def fall_back(self, module: nn.Module, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Answers a call with the original forward and counts why."""
        self.calls.fallbacks[reason] += 1
        return self.original(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Served:
        # A copy of a whole model has an owner of its own. A copy of one module, as PEFT's modules_to_save, stays in the
        # model.
        owner = memo.get(id(self.owner), self.owner)
        return Served(
            self.op, self.name, copy.deepcopy(self.params, memo), self.kernel, self.device_type, self.original,
            owner, self.calls,
        )  # fmt: skip


FastForward = Callable[..., Any]
"""``fast(module, served, *args, **kwargs)``: takes the place of ``forward`` on the instance. A module-level function:
it must not close over a module, since one private class a (stock class, operation, fast) serves every instance."""


@dataclass
class Site:
    """A module that should be served, as its finder hands it over.

    Attributes:
        op: operation's name.
        name: qualified name in the model.
        module: the module.
        fast: the forward that takes over.
        params: what ``fast`` needs to know about this module. Deep-copied with the module.
        kernel: the kernel chosen for the module's device and dtype.
        prove: compares fast and original on a probe (forward and every gradient) and returns the reason why they
            differ, or None. Must not touch the module, its buffers, its gradients or the RNG state (the caller forks
            the RNG).
        verdict_key: sites of equal keys share one verdict; include the class and all that decides its mathematics.
    """

    op: str
    name: str
    module: nn.Module
    fast: FastForward
    params: Any
    kernel: Kernel
    prove: Callable[[], str | None]
    verdict_key: Hashable

    @property
    def device(self) -> torch.device:
        return device_of(self.module)


@dataclass(frozen=True)
class Left:
    """A module of an operation's kind that stays as it was.

    ``excused`` marks kinds that no version claims to serve (gated norms, MLA, 3-D experts), and modules that another
    operation serves: the report lists them, strict mode does not raise for them.
    """

    op: str
    name: str
    module: nn.Module
    reason: str
    excused: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why a module, or a call of one, is not of the kind that can be served.

    ``reason`` is empty where it is nothing of the operation's kind at all, which is not reported. ``excused`` is as in
    ``Left``.
    """

    reason: str = ""
    excused: bool = False


OTHER_ARGUMENTS = "called with other arguments than its input"
"""The reason why a call is not served that passes more than the activations, or passes them by name."""


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer; ``cpu`` where it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module's first floating-point parameter; float32 where it has none."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


def plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether ``tensor`` is an ordinary dense tensor: no DTensor, quantised or lazy subclass."""
    return type(tensor) is torch.Tensor or type(tensor) is nn.Parameter


def hooked(module: nn.Module) -> bool:
    """Whether somebody is called with this module, as with every module, or in place of its forward."""
    own = module.__dict__
    return bool(
        torch_module._has_any_global_hook()
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def why_not_input(x: object, device_type: str) -> str | None:
    """Why no kernel for ``device_type`` may be called with the activations ``x``, whatever the operation."""
    if not plain(x):
        return f"input of type {type(x).__name__}"
    if not x.is_floating_point():
        return f"input of {x.dtype}"
    if x.device.type != device_type:
        return f"input on {x.device.type}, patched for {device_type}"
    return None


def why_not_touchable(module: nn.Module, known: tuple[type, ...] = ()) -> str | None:
    """Why a module's forward cannot be taken over, whatever it computes; None where it can.

    ``known`` are types of weights that the caller can read, beside plain tensors.
    """
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance by somebody else"
    if hasattr(module, "_hf_hook"):
        return "accelerate's device hooks wrap its forward"
    if hasattr(module, "parametrizations"):
        return "its weights are parametrized"
    for tensor in module.parameters(recurse=False):
        if tensor.is_meta:
            return "its weights are on the meta device"
        if hasattr(tensor, "ds_id"):
            return "its weights are partitioned by ZeRO-3"
        if not plain(tensor) and type(tensor) not in known:
            return f"its weights are of type {type(tensor).__name__}"
    return None
