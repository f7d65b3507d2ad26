"""From LLaMA-Factory's arguments to settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slothplug.errors import ConflictError
from slothplug.integrations import conflicts
from slothplug.integrations.chosen import choose
from slothplug.integrations.hf.flag import flag_value
from slothplug.integrations.llamafactory import arguments, log
from slothplug.integrations.llamafactory.arguments import Arguments
from slothplug.integrations.llamafactory.conflicts import CONFLICTS
from slothplug.settings import FLAG, Settings

UNSLOTH = "use_unsloth"

READ_LOGITS = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
"""Switches of losses that are computed from the model's logits."""

STAGES_WITH_LOSS = ("sft", "pt")
"""Stages whose loss is the model's own. The objectives of the others are computed from logits or hidden states."""

_KEYS = (FLAG, UNSLOTH, "stage", *READ_LOGITS, *(conflict.key for conflict in CONFLICTS))

logger = logging.getLogger("slothplug")


@dataclass(frozen=True)
class Training:
    """A training run that slothplug serves.

    Attributes:
        args: the arguments for LLaMA-Factory, with ``use_fast_kernels`` in them and ``use_unsloth`` off.
        settings: what the model is to be patched with.
        notes: sentences for the report.
        padding_key: what removes padding in this stage; empty where nothing does.
    """

    args: Arguments
    settings: Settings
    notes: tuple[str, ...]
    padding_key: str


def training_of(args: Arguments) -> Training | None:
    """The run that the arguments ask slothplug for; None where they do not.

    Raises:
        SettingsError: the flag or one of its settings is not valid, or names an operation that there is not.
        ConflictError: another key asks for what slothplug does.
    """
    values = arguments.read(args, _KEYS)
    flag = flag_value(values.get(FLAG, False))
    unsloth = arguments.is_on(values.get(UNSLOTH))
    serve_unsloth = unsloth and FLAG not in values and _unsloth() is None
    settings = Settings.from_flag(flag or serve_unsloth)
    if settings is None:
        return None
    log.show()
    notes = []
    if unsloth:
        if (installed := _unsloth()) is not None:
            raise ConflictError(
                f"`{FLAG}` and `{UNSLOTH}: true` are both on, and Unsloth {installed} is installed; no model was "
                f"loaded. Delete the line `{UNSLOTH}: true` to train on slothplug's kernels, or the line `{FLAG}` to "
                f"train on Unsloth's."
            )
        notes.append(
            f"`{UNSLOTH}: true` is served by slothplug, since Unsloth is not installed: LLaMA-Factory loads the model "
            f"as it does without the key, and it trains on slothplug's kernels"
        )
        logger.info("slothplug: %s", notes[0])
    switched_on = {key: value for key, value in values.items() if arguments.is_on(value)}
    conflicts.refuse(settings, CONFLICTS, switched_on, asked=UNSLOTH if serve_unsloth else FLAG)
    chosen = choose(settings, _reader_of_logits(values))
    if chosen.note:
        notes.append(chosen.note)
    return Training(
        args=arguments.change(args, **{FLAG: flag or True} | ({UNSLOTH: False} if unsloth else {})),
        settings=chosen.settings,
        notes=tuple(notes),
        padding_key="neat_packing: true" if values.get("stage", "sft") == "sft" else "",
    )


def inference_of(args: Arguments) -> Arguments:
    """The arguments of a run that does not train, with ``use_unsloth`` off where Unsloth is not installed."""
    if not arguments.is_on(arguments.read(args, [UNSLOTH]).get(UNSLOTH)) or _unsloth() is not None:
        return args
    log.show()
    logger.info(
        "slothplug: `%s: true` without Unsloth: LLaMA-Factory loads the model as it does without the key. slothplug "
        "serves training only.",
        UNSLOTH,
    )
    return arguments.change(args, **{UNSLOTH: False})


def _unsloth() -> str | None:
    """The version of Unsloth that is installed, asked as LLaMA-Factory asks."""
    try:
        return version("unsloth")
    except PackageNotFoundError:
        return None


def _reader_of_logits(values: Mapping[str, Any]) -> str | None:
    stage = values.get("stage", "sft")
    if stage not in STAGES_WITH_LOSS:
        return f"stage: {stage}"
    return next((f"{key}: true" for key in READ_LOGITS if arguments.is_on(values.get(key))), None)
