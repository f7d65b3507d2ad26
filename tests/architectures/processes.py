"""Rows of the table, each made in a process of its own, so that one type's failure or memory touches no other."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from slothplug.ops import BUILT_IN

TIMEOUT_SECONDS = 400
MEMORY_BYTES = 12 << 30

# A server that has imported these is forked for each row, which saves the row some ten seconds of imports.
_PRELOAD = [
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "peft",
    "tests.architectures.one",
    *(f"slothplug.ops.{name}" for name in BUILT_IN),
]


def rows(model_types: Sequence[str], workers: int, survey: Callable[[str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``survey`` makes of ``model_types``, in their order."""
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():  # CUDA does not survive a fork
        context.set_forkserver_preload(_PRELOAD)
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda model_type: _row(context, model_type, survey), model_types)


def _row(context: Any, model_type: str, survey: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(sender, model_type, survey))
    process.start()
    sender.close()
    try:
        if receiver.poll(TIMEOUT_SECONDS):
            row: dict[str, Any] = receiver.recv()
            return row
        return {"type": model_type, "not_built": f"took longer than {TIMEOUT_SECONDS} s"}
    except EOFError:
        process.join()
        return {"type": model_type, "not_built": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_row(sender: Connection, model_type: str, survey: Callable[[str], dict[str, Any]]) -> None:
    if not torch.cuda.is_available():  # whose driver maps more than there is
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sender.send(survey(model_type))
