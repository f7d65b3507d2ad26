"""What a framework's configuration asks for, once its own keys have had their say."""

from __future__ import annotations

from dataclasses import dataclass

from slothplug.plugins import operations
from slothplug.settings import Settings


@dataclass(frozen=True)
class Chosen:
    """Settings, and a sentence for the report where they are not all that the user wrote."""

    settings: Settings
    note: str | None = None


def choose(settings: Settings, reader: str | None) -> Chosen:
    """The settings of a run in which ``reader``, a key with its value, reads the model's logits; None: nobody does.

    Raises:
        SettingsError: they name an operation that there is not.
    """
    settings.check_ops([operation.name for operation in operations()])
    if reader is None or settings.keep_logits:
        return Chosen(settings)
    # Logits that were put off would be computed when they are read, after a loss that nobody uses.
    return Chosen(
        settings.model_copy(update={"keep_logits": True}),
        f"the output head computes real logits (as with keep_logits: true), because {reader} reads them",
    )
