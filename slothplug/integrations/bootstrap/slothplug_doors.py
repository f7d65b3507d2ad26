"""Front doors that open when the module that they belong to has been imported.

``sitecustomize`` beside this file, for ``slothplug run``, and the hook of ``slothplug autoload`` execute it when a
Python process starts. Only the standard library is imported here, and the package ``slothplug`` is not: a process that
never imports one of the modules in ``DOORS`` pays for nothing.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # importing typing, with what it imports, takes longer than all the rest of this file
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FLAG = "use_fast_kernels"
_FALSE = ("no", "false", "f", "n", "0")

_LLAMAFACTORY = "slothplug.integrations.llamafactory"

DOORS = {
    "transformers.training_args": ("slothplug.integrations.hf.frontdoor", "open_arguments", "TrainingArguments"),
    "transformers.trainer": ("slothplug.integrations.hf.frontdoor", "open_trainer", "Trainer"),
    "axolotl.cli.config": ("slothplug.integrations.axolotl.frontdoor", "open_config", "prepare_plugins"),
    "llamafactory.hparams.parser": (f"{_LLAMAFACTORY}.frontdoor", "open_inference", "get_infer_args"),
    "llamafactory.train.tuner": (f"{_LLAMAFACTORY}.frontdoor", "open_training", "run_exp"),
}
"""Module that is waited for -> our module, its function, and the awaited module's attribute that it is called with."""


class DoorFinder:
    """Finds the modules in ``DOORS`` as the other finders do, and opens their door when they have been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in DOORS:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(name, path, target)
            if spec:
                self._open_after(spec.loader, DOORS[name])
                return spec
        return None

    @staticmethod
    def _open_after(loader: Any, door: tuple[str, str, str]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import importlib

            del loader.exec_module
            execute(module)
            home, function, argument = door
            try:
                opener = getattr(importlib.import_module(home), function)
            except ModuleNotFoundError as error:
                if error.name != "slothplug":
                    raise
                raise ImportError(
                    f"slothplug run: slothplug is not installed for {sys.executable}. Install it there, or run the "
                    f"command without 'slothplug run'."
                ) from None
            opener(getattr(module, argument))

        # On this loader instance only: the module's spec and loader stay of the classes that others expect.
        loader.exec_module = exec_module


def warn_unread() -> None:
    """At exit: says that nothing read the flag which stands on the command line of a script of the user's own.

    Launchers pass the flag on to other processes, and are installed: they lie in site-packages or have no ``.py``.
    """
    main = sys.argv[0]  # Python has deleted __main__.__file__ by now
    own = main.endswith(".py") and "site-packages" not in main and "dist-packages" not in main
    processes = sys.modules.get("multiprocessing")
    worker = processes is not None and processes.parent_process() is not None
    if not own or worker or "torch" not in sys.modules or os.environ.get("RANK", "0") != "0" or not _asks(sys.argv[1:]):
        return
    settings = sys.modules.get("slothplug.settings")
    if settings is None or not settings.flags_read:
        print(
            f"slothplug: warning: --{FLAG} is on the command line, but nothing in {os.path.basename(main)} read it, so "
            f"no model ran on fused kernels. Write {FLAG}=True into the script's call of TrainingArguments, or let it "
            f"parse the command line with HfArgumentParser, or call slothplug.patch(model) before training.",
            file=sys.stderr,
        )


def _asks(words: list[str]) -> bool:
    """Whether the words of a command line switch the flag on, in a spelling that a parser takes."""
    for index, word in enumerate(words):
        name, given, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") == FLAG and (given or name.startswith("--")):
            following = words[index + 1] if index + 1 < len(words) else ""
            return (value if given else following).lower() not in _FALSE
    return False


# The hook's file is executed twice in a virtual environment of Python 3.11, and `slothplug run` may come on top of it.
if not any(type(finder).__name__ == DoorFinder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, DoorFinder())
    atexit.register(warn_unread)
