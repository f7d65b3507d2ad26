"""``slothplug-llamafactory``: LLaMA-Factory's command line, whose ``train`` knows the flags. Nothing is wrapped.

Of LLaMA-Factory one global is changed, in this command's own process and only where that starts others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "worker" / "llamafactory_worker.py"


def main() -> None:
    """Runs ``train`` here, in this process or in those that LLaMA-Factory starts; every other command is its own."""
    from llamafactory import launcher

    if sys.argv[1:2] == ["train"] and not _starts_processes():
        del sys.argv[1]
        train()
        return
    launcher.__file__ = str(WORKER)  # the script that it gives to torchrun
    launcher.launch()


def train() -> None:
    """Trains in this process, with the arguments of its command line.

    Raises:
        SystemExit: 2, with one sentence, where the flags ask for what cannot be done.
    """
    from llamafactory.train import tuner

    from slothplug.errors import SlothplugError
    from slothplug.integrations.llamafactory.training import prepare

    if {"-h", "--help"} & set(sys.argv):
        print("use_fast_kernels is slothplug's own argument: true, false, or a mapping of settings.\n")
    try:
        args, callbacks = prepare()
    except SlothplugError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    tuner.run_exp(args, callbacks)


def _starts_processes() -> bool:
    """Whether LLaMA-Factory's ``train`` starts torchrun."""
    from llamafactory.extras.misc import get_device_count, is_env_enabled, use_kt, use_ray

    if "LOCAL_RANK" in os.environ:  # this is one of the processes that torchrun or accelerate started
        return False
    return is_env_enabled("FORCE_TORCHRUN") or (get_device_count() > 1 and not use_ray() and not use_kt())
