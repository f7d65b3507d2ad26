"""The plugin manager: built-in operations and third parties register alike; a third party's fault ends no run."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy
from torch import nn

from slothplug import hookspecs
from slothplug.errors import SlothplugError
from slothplug.patching.model_context import SharedState
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site

if TYPE_CHECKING:
    import torch

    from slothplug.settings import Settings

logger = logging.getLogger("slothplug")


class PluginFault(NamedTuple):
    """What a third-party plugin did wrong; the run goes on without it.

    Attributes:
        plugin: its registered name.
        sentence: what it did, and that its answer was left out.
    """

    plugin: str
    sentence: str


class PluginManager(pluggy.PluginManager):
    """A manager that contains the faults of third parties: built-in plugins raise, others are left out and named.

    An answer of the wrong type is a fault like an exception. Errors of ``slothplug.errors`` pass: with these a plugin
    says that the run must not go on.

    Attributes:
        load_faults: of installed plugins that could not be loaded.
        faults: of hooks, in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        self.load_faults: list[PluginFault] = []
        self.faults: list[PluginFault] = []

    def register_built_in(self, plugin: object, name: str) -> None:
        """Registers a plugin whose faults are bugs of this package, and raise."""
        super().register(plugin, name)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Registers a third party's plugin and returns its name.

        Raises:
            pluggy.PluginValidationError: a hook's name or one of its parameters is not in ``slothplug.hookspecs``.
            ValueError: the plugin, or another of its name, is registered.
        """
        registered = super().register(plugin, name)
        try:
            self.check_pending()
        except pluggy.PluginValidationError:
            self.unregister(plugin)
            raise
        for caller in self.get_hookcallers(plugin) or () if registered else ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin and not (implementation.wrapper or implementation.hookwrapper):
                    implementation.function = self._contained(  # type: ignore[misc]
                        implementation.function, str(registered), caller.name
                    )
        return registered

    def load_installed(self) -> None:
        """Loads the plugins of the entry-point group; one that cannot be loaded is noted."""
        for entry in importlib.metadata.entry_points(group=hookspecs.PROJECT):
            if self.has_plugin(entry.name) or self.is_blocked(entry.name):
                continue
            try:
                self.register(entry.load(), entry.name)
            except SlothplugError:
                raise
            except Exception as error:
                sentence = f"plugin '{entry.name}' ({entry.value}) could not be loaded and is not used: {_say(error)}"
                self._note(self.load_faults, PluginFault(entry.name, sentence))

    def _contained(self, function: Callable[..., Any], plugin: str, hook: str) -> Callable[..., Any]:
        """``function`` with its answer checked; None, as if the plugin had no such hook, where it fails."""
        check = _CHECKS.get(hook)

        @functools.wraps(function)
        def contained(*arguments: Any) -> Any:
            try:
                answer = function(*arguments)
                return answer if answer is None or check is None else check(answer)
            except SlothplugError:
                raise
            except Exception as error:
                sentence = f"plugin '{plugin}' failed in {hook}, and its answer was left out: {_say(error)}"
                self._note(self.faults, PluginFault(plugin, sentence))
                return None

        return contained

    @staticmethod
    def _note(faults: list[PluginFault], fault: PluginFault) -> None:
        if fault not in faults:  # a kernel is asked for once a module
            logger.warning("slothplug: %s", fault.sentence, exc_info=True)
        faults.append(fault)


def _say(error: Exception) -> str:
    """The exception in one line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _check_operations(answer: Any) -> list[Operation]:
    items = [_checked(item, Operation) for item in answer]
    for item in items:
        if item.shared is not None and not (isinstance(item.shared, type) and issubclass(item.shared, SharedState)):
            raise TypeError(f"operation '{item.name}' declares {item.shared!r} as shared, which is no SharedState")
    return items


def _check_sites(answer: Any) -> list[Site[Any] | Left]:
    known = {operation.name for operation in operations()}
    items = list(answer)
    for item in items:
        _checked(item, Site, Left)
        _checked(item.module, nn.Module)
        if item.op not in known:
            raise ValueError(f"'{item.name}' is of operation '{item.op}', which no plugin introduces")
        if isinstance(item, Left):
            _checked(item.refusal, Refusal)
        else:
            _checked(item.kernel, Kernel)
            _checked(item.fast, Callable)
            _checked(item.prove, Callable)
            hash((item.verdict_key, item.fast))
            for module in item.subsumes:
                _checked(module, nn.Module)
    return items


def _check_kernel(answer: Any) -> Kernel:
    _checked(_checked(answer, Kernel).function, Callable)
    return answer


def _check_conflicts(answer: Any) -> list[str]:
    if isinstance(answer, str):
        raise TypeError("expected several str, found one")
    return [_checked(item, str) for item in answer]


def _checked(item: Any, *types: Any) -> Any:
    if not isinstance(item, types):
        expected = " or ".join(kind.__name__ for kind in types)
        raise TypeError(f"expected {expected}, found {type(item).__name__}")
    return item


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "slothplug_operations": _check_operations,
    "slothplug_find_sites": _check_sites,
    "slothplug_kernel": _check_kernel,
    "slothplug_conflicts": _check_conflicts,
}
"""Turns a hook's answer into what its specification promises. Generators run here, where their faults are contained."""


@functools.cache
def plugin_manager() -> PluginManager:
    """The process's manager, with the built-in operations and every installed plugin of group ``slothplug``."""
    manager = PluginManager()
    for name in importlib.import_module("slothplug.ops").BUILT_IN:
        manager.register_built_in(importlib.import_module(f"slothplug.ops.{name}"), f"slothplug.{name}")
    manager.register_built_in(importlib.import_module("slothplug.patching.conflicts"), "slothplug.conflicts")
    for room in ("checkpointing", "graphs"):
        manager.register_built_in(importlib.import_module(f"slothplug.{room}"), f"slothplug.{room}")
    manager.check_pending()
    manager.load_installed()
    return manager


def operations() -> list[Operation]:
    """The operations that the registered plugins introduce, in the order of registration."""
    return [operation for group in reversed(plugin_manager().hook.slothplug_operations()) for operation in group]


def kernel_for(operation: str, device: torch.device, dtype: torch.dtype, settings: Settings) -> Kernel | None:
    """The kernel that the registered plugins offer for ``operation`` on ``device`` in ``dtype``, or None."""
    return plugin_manager().hook.slothplug_kernel(operation=operation, device=device, dtype=dtype, settings=settings)
