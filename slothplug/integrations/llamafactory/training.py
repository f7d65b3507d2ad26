"""LLaMA-Factory's ``run_exp`` with the flags, on its public functions only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llamafactory.hparams import read_args
from llamafactory.train import tuner

from slothplug.integrations.hf import FastKernelsCallback
from slothplug.integrations.llamafactory import arguments
from slothplug.integrations.llamafactory.arguments import Arguments
from slothplug.integrations.llamafactory.translation import Training, training_of
from slothplug.settings import FLAG

if TYPE_CHECKING:
    from transformers import TrainerCallback


def run_exp(args: Arguments | None = None, callbacks: Iterable[TrainerCallback] | None = None) -> None:
    """Trains as ``llamafactory.train.tuner.run_exp`` does, with ``use_fast_kernels`` and ``use_unsloth`` served.

    Args:
        args: the configuration as a mapping, or the words of a command line; by default this process's command line.
        callbacks: the caller's own callbacks for the trainer.

    Raises:
        SettingsError: the flag or one of its settings is not valid.
        ConflictError: another key asks for what slothplug does, or the model was already changed by other kernels.
    """
    plain, ours = prepare(args)
    tuner.run_exp(plain, [*(callbacks or ()), *ours])


def prepare(args: Arguments | None = None) -> tuple[Arguments, list[Any]]:
    """The arguments without the flag, and our callbacks; before anything is loaded."""
    args = read_args(args)
    training = training_of(args)
    return arguments.without(training.args if training else args, FLAG), callbacks_of(training)


def callbacks_of(training: Training | None) -> list[Any]:
    if training is None:
        return []
    return [FastKernelsCallback(training.settings, padding_key=training.padding_key, notes=training.notes)]
