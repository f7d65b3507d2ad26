"""The plugin manager: built-in operations and third parties register alike."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import pluggy

from slothplug import hookspecs

if TYPE_CHECKING:
    import torch

    from slothplug.patching.sites import Kernel, Operation
    from slothplug.settings import Settings


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The process's manager, with the built-in operations and every installed plugin of group ``slothplug``."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in importlib.import_module("slothplug.ops").BUILT_IN:
        manager.register(importlib.import_module(f"slothplug.ops.{name}"), name=f"slothplug.{name}")
    manager.register(importlib.import_module("slothplug.patching.conflicts"), name="slothplug.conflicts")
    manager.load_setuptools_entrypoints(hookspecs.PROJECT)
    manager.check_pending()
    return manager


def operations() -> list[Operation]:
    """The operations that the registered plugins introduce, in the order of registration."""
    return [operation for group in reversed(plugin_manager().hook.slothplug_operations()) for operation in group]


def kernel_for(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The kernel that the registered plugins offer for ``operation`` on ``device`` in ``dtype``, or None."""
    return plugin_manager().hook.slothplug_kernel(operation=operation, device=device, dtype=dtype, settings=settings)
