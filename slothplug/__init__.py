"""Fused kernels for the model that is about to be trained: one flag, stock numbers, a report, and a way back.

Importing this package changes nothing anywhere. ``patch(model)`` changes that model and no other.
"""

from slothplug.errors import (
    ConflictError,
    NothingFusedError,
    NothingFusedWarning,
    SettingsError,
    SlothplugError,
    StaleLogitsError,
    UndoError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from slothplug.hookspecs import hookimpl
from slothplug.patching.patch import fast_kernels, patch
from slothplug.patching.report import Report, SiteReport, unpatch
from slothplug.plugins import plugin_manager
from slothplug.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "ConflictError",
    "NothingFusedError",
    "NothingFusedWarning",
    "Report",
    "Settings",
    "SettingsError",
    "SiteReport",
    "SlothplugError",
    "StaleLogitsError",
    "UndoError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "fast_kernels",
    "hookimpl",
    "patch",
    "plugin_manager",
    "unpatch",
]
