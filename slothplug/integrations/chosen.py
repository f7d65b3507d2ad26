"""Settings that a framework's configuration asks for, adjusted to the framework's own keys."""

from __future__ import annotations

from dataclasses import dataclass

from slothplug.plugins import operations
from slothplug.settings import Settings


@dataclass(frozen=True)
class Chosen:
    """Settings, and a sentence for the report if they differ from what the user wrote."""

    settings: Settings
    note: str | None = None


def choose(settings: Settings, reader: str | None) -> Chosen:
    """The settings of a run; ``reader`` is the key, with its value, that makes it read the model's logits, or None.

    Raises:
        SettingsError: the settings name an unknown operation.
    """
    settings.check_ops([operation.name for operation in operations()])
    if reader is None or settings.keep_logits:
        return Chosen(settings)
    # A fused head would compute a loss that is not used, and the logits as well as soon as they are read.
    return Chosen(
        settings.model_copy(update={"keep_logits": True}),
        f"the output head computes real logits (as with keep_logits: true), because {reader} reads them",
    )
