"""The front door: what is wrapped in LLaMA-Factory so that its own commands serve the flags.

Reached by ``slothplug run`` and ``slothplug autoload`` only, which also open transformers' door: that one makes
``use_fast_kernels`` a field of LLaMA-Factory's training arguments. This one changes

- ``llamafactory.train.tuner.run_exp``, which every training process calls once: it gets the callback that patches, and
  ``use_unsloth: true`` is served where Unsloth is not installed;
- ``llamafactory.hparams.parser.get_infer_args``, by which chat, API and export read their arguments: ``use_unsloth:
  true`` is no error there where Unsloth is not installed.

Each once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from slothplug.integrations.llamafactory.arguments import Arguments
from slothplug.integrations.wrapped import wrap

_PARSER = "llamafactory.hparams.parser"


def open_training(_: Callable[..., Any]) -> None:
    """Wraps ``llamafactory.train.tuner.run_exp``. Does nothing where that is done."""
    wrap("llamafactory.train.tuner", "run_exp", _training)


def open_inference(_: Callable[..., Any]) -> None:
    """Wraps ``llamafactory.hparams.parser.get_infer_args``. Does nothing where that is done."""
    wrap(_PARSER, "get_infer_args", _inference)


def _training(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_exp(args: Arguments | None = None, callbacks: list[Any] | None = None) -> Any:
        from slothplug.integrations.llamafactory.training import callbacks_of
        from slothplug.integrations.llamafactory.translation import training_of

        read = sys.modules[_PARSER].read_args(args)
        training = training_of(read)
        return original(training.args if training else read, [*(callbacks or ()), *callbacks_of(training)])

    return run_exp


def _inference(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_infer_args(args: Arguments | None = None) -> Any:
        from slothplug.integrations.llamafactory.translation import inference_of

        return original(inference_of(sys.modules[_PARSER].read_args(args)))

    return get_infer_args
