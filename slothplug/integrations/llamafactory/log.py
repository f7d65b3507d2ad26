"""slothplug's lines in LLaMA-Factory's log: its format, its stream, and the log that its web UI shows."""

from __future__ import annotations

import logging
import os


class _LlamaFactorys(logging.Handler):
    """Gives records to the handlers that LLaMA-Factory's logger has at the moment; the web UI's comes late."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("llamafactory").callHandlers(record)


def show() -> None:
    """Shows INFO lines of the logger ``slothplug`` on each machine's main process, unless the user decided. Once."""
    logger = logging.getLogger("slothplug")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.WARNING)
    if not logger.handlers:
        logger.addHandler(_LlamaFactorys())
        logger.propagate = False
