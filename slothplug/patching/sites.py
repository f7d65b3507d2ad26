"""The nouns of a patch: operations, kernels, the sites that finders hand over, and refusals.

There is one way to say no. Whoever looks for something answers with it or with a ``Refusal``; a question named
``why_not_...`` is answered by a ``Refusal``, or by None where nothing stands against it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from slothplug.kernels.backend import choose_backend, why_not_triton
from slothplug.settings import Settings

if TYPE_CHECKING:
    from slothplug.patching.model_context import SharedState
    from slothplug.patching.served import Served
    from slothplug.patching.watch import Watch

Spec = TypeVar("Spec")


class Refusal(NamedTuple):
    """Why a module, or a call of one, is not served.

    Attributes:
        reason: words for the report; empty where the module is not of the operation's kind at all, which is not
            reported.
        excused: True for kinds that no version claims to serve (gated norms, MLA, 3-D experts) and for modules that
            another operation serves: the report lists them, strict mode does not raise for them.
    """

    reason: str = ""
    excused: bool = False

    def within(self, where: str) -> Refusal:
        """The same refusal with its place in front: ``"{where}: {reason}"``."""
        return Refusal(f"{where}: {self.reason}", self.excused)


@dataclass(frozen=True)
class Operation:
    """A kind of computation that can be fused.

    Attributes:
        name: the word for it in ``ops``, ``skip_ops`` and the report.
        summary: what is fused, in a line; ``slothplug doctor`` prints it.
        shared: class of what the operation's served modules of one patched model share; it is made when the first of
            them is served. None where they share nothing.
        competitors: dotted prefixes of Python modules of other projects whose replacements do the same work, as
            ``liger_kernel.transformers.rms_norm``: a model that they changed is a conflict where the operation is
            wanted.
    """

    name: str
    summary: str
    shared: type[SharedState] | None = None
    competitors: tuple[str, ...] = ()


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

        None where the settings name a backend that cannot serve the device.
        """
        backend = choose_backend(device) if settings.backend == "auto" else settings.backend
        if backend == "triton" and why_not_triton(device):
            return None
        return cls(name, backend, partial(function, backend=backend))


FastForward = Callable[..., Any]
"""``fast(module, served, *args, **kwargs)``: takes the place of ``forward`` on the instance. A module-level function:
one private class for each (stock class, fast) serves every instance, so it must not close over a module."""

Bind = Callable[[nn.Module, "Served[Any, Any]", "Watch"], Any]
"""``bind(module, served, watch)``: what calls may take for granted until something that ``watch`` saw changes, or a
``Refusal``. A module-level function. It must read every mutable thing that its answer depends on through ``watch``."""


@dataclass
class Site(Generic[Spec]):
    """A module that should be served, as its finder hands it over.

    Attributes:
        op: operation's name.
        name: qualified name in the model.
        module: the module.
        fast: the forward that takes over.
        spec: what the finder learned about this module and ``fast`` needs. Deep-copied with the module.
        kernel: the kernel chosen for the module's device and dtype.
        prove: compares fast and original on a probe (forward and every gradient); a ``Refusal`` where they differ, else
            None. Must not touch the module, its buffers, its gradients or the RNG state (the caller forks the RNG).
        verdict_key: sites of equal keys share one verdict; include the class and all that decides its mathematics.
        bind: what may be decided once for each outermost call; None where the operation decides on every call.
        subsumes: served modules inside this one that do not run while this site serves. They stay patched for the calls
            that fall back, and count as used where this site is used.
    """

    op: str
    name: str
    module: nn.Module
    fast: FastForward
    spec: Spec
    kernel: Kernel
    prove: Callable[[], Refusal | None]
    verdict_key: Hashable
    bind: Bind | None = None
    subsumes: Sequence[nn.Module] = ()


class Left(NamedTuple):
    """A module of an operation's kind that stays as it was, and why."""

    op: str
    name: str
    module: nn.Module
    refusal: Refusal
