"""What slothplug raises and warns with. Every message names the setting or module, what was found, and what to do."""

from __future__ import annotations


class SlothplugError(Exception):
    """Base of every error of this package."""


class SettingsError(SlothplugError, ValueError):
    """The flag or one of its settings is not valid."""


class ConflictError(SlothplugError, RuntimeError):
    """Something else already changed this model, or was asked to, in a way that cannot live beside slothplug."""


class UnsupportedModelError(SlothplugError, RuntimeError):
    """The model cannot be patched in the state it is in (on ``meta``, on two devices)."""


class UnsupportedVersionError(SlothplugError, RuntimeError):
    """A package that the model comes from is older than the oldest supported version."""


class NothingFusedError(SlothplugError, RuntimeError):
    """``strict: true`` and a site was left as it was, or none was found."""


class UndoError(SlothplugError, RuntimeError):
    """A module cannot be given back its own class, because another class was put above ours."""


class NothingFusedWarning(UserWarning):
    """The flag is on and no site of the model could be fused, or what was fused is compiled and runs stock."""


class StaleLogitsError(SlothplugError, RuntimeError):
    """Logits, or their gradient, were asked for when they can no longer be had: ``keep_logits: true`` computes them."""
