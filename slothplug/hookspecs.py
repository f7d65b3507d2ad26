"""The pluggy contract. A plugin is a module or object with some of these functions, marked with ``slothplug.hookimpl``.

Everything slothplug does itself goes through these hooks (``slothplug.ops``); a plugin of somebody else comes in by the
same door: the entry-point group ``slothplug``, or ``slothplug.plugin_manager().register(plugin)``. ``slothplug.plugin``
has all names that a plugin imports.

A hook may leave out parameters that it does not need. Plugins that registered last are asked first. A hook of a third
party that raises, or answers with another type than is said here, is left out and named in the report; an error of
``slothplug.errors`` passes to the user instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slothplug.patching.report import Report
    from slothplug.patching.sites import Kernel, Left, Operation, Site
    from slothplug.settings import Settings

PROJECT = "slothplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def slothplug_operations() -> Iterable[Operation]:
    """The operations that this plugin introduces: their names are what ``ops`` and ``skip_ops`` accept.

    Called whenever settings are checked, with or without a model, and by ``slothplug doctor``.

    Returns:
        The same operations on every call. Of two of one name the one of the plugin that registered last counts.
    """
    raise NotImplementedError


@hookspec
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterable[Site | Left]:
    """The modules of ``model`` that could be served, found by structure.

    Called once a patch, also when a patched model is patched again, with gradients on, no autocast and no TF32.

    Args:
        model: the model inside all wrappers (DDP, FSDP, PEFT, ...), in training or evaluation mode, on any device,
            possibly sharded or on ``meta``. Its modules may have private classes of an earlier patch:
            ``patching.private_class.stock_class`` sees through them. Change nothing of it: no parameter, buffer,
            gradient, flag or hook, and no generator's state.
        settings: of the patch. Sites of operations that they leave out are dropped, so this need not ask.

    Returns:
        A ``Site`` for each module that should be served, or a ``Left`` with the reason where a module is of the right
        kind but cannot be; nothing about all others. What is said first about a module and an operation counts, and a
        module is served for one operation only. The report keeps the order.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The kernel that should serve ``operation`` for tensors of ``dtype`` on ``device``.

    Called by finders, for each module of a patch; never during training.

    Args:
        operation: an operation's name, this plugin's or another's.
        device: of the module's weights.
        dtype: of the module's weights. Calls may have inputs of another one.
        settings: of the patch; ``backend`` is the user's choice of Triton or PyTorch.

    Returns:
        A kernel, which ends the search, or None to leave it to the plugins that are asked next. A kernel is held to the
        operation's documented signature, and is compared with the original module's forward and backward before it is
        used.
    """
    raise NotImplementedError


@hookspec
def slothplug_conflicts(model: nn.Module, settings: Settings) -> Iterable[str]:
    """Reasons why ``model`` must not be patched.

    Called once a patch, before sites are looked for.

    Args:
        model: the model inside all wrappers. Change nothing of it.
        settings: of the patch: what works beside some operations is no conflict where the others are left out.

    Returns:
        Sentences that name what was found and what to do. Any of them refuses the patch with ``ConflictError``.
    """
    raise NotImplementedError


@hookspec
def slothplug_before_patch(model: nn.Module, sites: Sequence[Site[Any]], settings: Settings) -> None:
    """Called with the proved sites, before the first of them is changed; also where there are none.

    Args:
        model: the model inside all wrappers, as it was. It may be changed here, as far as the proofs still hold.
        sites: those that are about to be served; those of an earlier patch are not among them. Not to be changed.
        settings: of the patch.
    """


@hookspec
def slothplug_after_patch(model: nn.Module, report: Report) -> None:
    """Called when every site is patched, before the outcome is logged and before ``strict`` is judged.

    Args:
        model: the model inside all wrappers, patched. It is given back unpatched if ``strict`` refuses.
        report: has its sites. Sentences may be appended to ``report.notes``; nothing else is to be changed.
    """
