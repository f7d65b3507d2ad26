"""The pluggy contract. A plugin is a module or object with some of these functions, marked with ``slothplug.hookimpl``.

Everything slothplug does itself goes through these hooks (``slothplug.ops``); a plugin of somebody else comes
in by the same door: the entry-point group ``slothplug``, or ``slothplug.plugin_manager().register(plugin)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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
    """The operations that this plugin introduces: their names are what ``ops`` and ``skip_ops`` accept."""
    raise NotImplementedError


@hookspec
def slothplug_find_sites(model: nn.Module, settings: Settings) -> Iterable[Site | Left]:
    """The modules of ``model`` that could be served, found by structure.

    Called once a patch with the unwrapped model, in training or evaluation mode, on any device, possibly sharded.
    Return a ``Site`` for each module that should be served, or a ``Left`` with the reason where a module is of the
    right kind but cannot be. Change nothing. Plugins registered last are asked first: what is said first about a
    module and an operation counts, and a module is served for one operation only.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def slothplug_kernel(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The kernel that should serve ``operation`` for tensors of ``dtype`` on ``device``, or None to leave it to others.

    Plugins registered last are asked first. A kernel is held to the operation's documented signature and is compared
    with the original module's forward and backward before it is used.
    """
    raise NotImplementedError


@hookspec
def slothplug_conflicts(model: nn.Module, settings: Settings) -> Iterable[str]:
    """Reasons why ``model`` must not be patched, as sentences that name what was found and what to do.

    Any reason refuses the patch with ``ConflictError`` before a module is changed.
    """
    raise NotImplementedError


@hookspec
def slothplug_before_patch(model: nn.Module, sites: list[Site], settings: Settings) -> None:
    """Called with the proved sites, before the first of them is changed."""
    raise NotImplementedError


@hookspec
def slothplug_after_patch(model: nn.Module, report: Report) -> None:
    """Called when every site is patched and the report is complete."""
    raise NotImplementedError
