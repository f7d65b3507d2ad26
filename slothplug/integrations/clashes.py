"""Keys of a framework that ask for what slothplug does: found before the model is loaded, and never stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slothplug.errors import ConflictError
from slothplug.settings import FLAG, Settings


@dataclass(frozen=True)
class Clash:
    """A key that cannot be on together with some of slothplug's operations.

    Attributes:
        key: the framework's key.
        why: what it does, as the continuation of "it".
        ops: the operations of slothplug that it cannot live with; beside the others it may stay. None: all.
        values: the values that clash; None: every one that is not false.
    """

    key: str
    why: str
    ops: tuple[str, ...] | None = None
    values: tuple[object, ...] | None = None

    def applies(self, settings: Settings, value: object) -> bool:
        asked = bool(value) if self.values is None else value in self.values
        return asked and (self.ops is None or any(settings.wants(op) for op in self.ops))


def line(key: str, value: object) -> str:
    """A key and its value as a line of the configuration."""
    return f"`{key}: {str(value).lower()}`"


def delete_line(clash: Clash, value: object) -> str:
    """How to mend a clash with a key that the user wrote."""
    return f"Delete the line {line(clash.key, value)}"


def refuse(
    settings: Settings,
    known: Iterable[Clash],
    values: Mapping[str, Any],
    *,
    asked: str = FLAG,
    mend: Callable[[Clash, object], str] = delete_line,
) -> None:
    """Raises where ``values`` hold keys that clash with ``settings``.

    Args:
        settings: the settings of the flag.
        known: the keys of this framework that may clash.
        values: the configuration.
        asked: what the user wrote to ask for slothplug.
        mend: how to mend a clash, as the beginning of a sentence.

    Raises:
        ConflictError: one or more keys clash; all are named, each with what to do.
    """
    found = [clash for clash in known if clash.applies(settings, values.get(clash.key))]
    if not found:
        return
    sentences = []
    for clash in found:
        value = values[clash.key]
        kept = f", or keep it and write `{FLAG}: {{skip_ops: [{', '.join(clash.ops)}]}}`" if clash.ops else ""
        sentences.append(
            f"{line(clash.key, value)} clashes with `{asked}`: it {clash.why}. {mend(clash, value)}{kept}."
        )
    raise ConflictError(
        f"{asked} is on, and so is what cannot be on beside it; no model was loaded. " + " ".join(sentences)
    )
