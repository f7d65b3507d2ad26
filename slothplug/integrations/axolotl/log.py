"""slothplug's lines in Axolotl's log."""

from __future__ import annotations

import logging
import os
import sys

from axolotl.logging_config import AxolotlOrWarnErrorFilter


class _Stdout(logging.StreamHandler):
    """Writes to the ``sys.stdout`` of the moment: Axolotl replaces it, to copy all output into ``debug.log``."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def show() -> None:
    """Shows INFO lines of the logger ``slothplug`` on the main process, in Axolotl's format, unless the user decided.

    Axolotl's handlers show INFO of its own loggers only, and a logger that is made after Axolotl's set-up drops it
    itself. So ours gets a handler of its own, once.
    """
    logger = logging.getLogger("slothplug")
    for dropping in [one for one in logger.filters if isinstance(one, AxolotlOrWarnErrorFilter)]:
        logger.removeFilter(dropping)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    if not logger.handlers:
        handler = _Stdout()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
