"""Keys of a framework that replace the same modules as slothplug: refused before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slothplug.errors import ConflictError
from slothplug.settings import FLAG, Settings


@dataclass(frozen=True)
class Conflict:
    """A key that cannot be on together with some operations of slothplug.

    Attributes:
        key: the framework's key.
        why: what it does, as the continuation of "it".
        ops: the operations that conflict with it; None if all do.
        values: the values that conflict; None if every value does that is not false.
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


def delete_line(conflict: Conflict, value: object) -> str:
    """How to mend a conflict with a key that the user wrote."""
    return f"Delete the line {line(conflict.key, value)}"


def refuse(
    settings: Settings,
    known: Iterable[Conflict],
    values: Mapping[str, Any],
    *,
    asked: str = FLAG,
    mend: Callable[[Conflict, object], str] = delete_line,
) -> None:
    """Raises where ``values`` hold keys that conflict with ``settings``.

    Args:
        settings: the settings of the flag.
        known: the keys of this framework that may conflict.
        values: the configuration.
        asked: what the user wrote to ask for slothplug.
        mend: how to mend a conflict, as the beginning of a sentence.

    Raises:
        ConflictError: one or more keys conflict; all are named, each with what to do.
    """
    found = [conflict for conflict in known if conflict.applies(settings, values.get(conflict.key))]
    if not found:
        return
    sentences = []
    for conflict in found:
        value = values[conflict.key]
        kept = f", or keep it and write `{FLAG}: {{skip_ops: [{', '.join(conflict.ops)}]}}`" if conflict.ops else ""
        sentences.append(
            f"{line(conflict.key, value)} conflicts with `{asked}`: it {conflict.why}. {mend(conflict, value)}{kept}."
        )
    raise ConflictError(
        f"{asked} is on, and so is what cannot be on beside it; no model was loaded. " + " ".join(sentences)
    )
