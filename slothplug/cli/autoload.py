"""``slothplug autoload on | off | status``: a start-up hook, so that commands are served without a word in front.

The hook is a ``.pth`` file beside the installed package, which Python's ``site`` executes whenever this environment's
interpreter starts. It is entered in the RECORD of the installed slothplug, so uninstalling takes it away.
"""

from __future__ import annotations

import site
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from slothplug.errors import SlothplugError

NAME = "slothplug-autoload.pth"

LINE = (
    "import importlib.util as u; s = u.find_spec('slothplug'); s = s and u.spec_from_file_location('slothplug_doors', "
    "s.submodule_search_locations[0] + '/integrations/bootstrap/slothplug_doors.py'); "
    "s and s.loader.exec_module(u.module_from_spec(s))\n"
)
"""Executes the doors, which import the standard library only, where slothplug is found; else it does nothing."""

_ENTRY = f"{NAME},,"


class AutoloadError(SlothplugError, RuntimeError):
    """The hook cannot be put where Python would find it."""


def run_autoload(what: Literal["on", "off", "status"]) -> None:
    """Puts the hook in or takes it out, and says which it is.

    Raises:
        AutoloadError: slothplug is not installed in a folder that Python looks through for such files.
    """
    record = _record()
    hook = record.parent.parent / NAME
    if what == "on":
        hook.write_text(LINE, encoding="utf-8")
        _enter(record, present=True)
    elif what == "off":
        hook.unlink(missing_ok=True)
        _enter(record, present=False)
    if hook.exists():
        print(f"autoload is on: every Python process of this environment reads {hook}")
    else:
        print(f"autoload is off: there is no {hook}")


def _record() -> Path:
    """The list of installed files that an installer keeps of slothplug."""
    try:
        installed = distribution("slothplug")
    except PackageNotFoundError:
        raise AutoloadError("slothplug is not installed here, only found. Install it with pip first.") from None
    records = [file for file in installed.files or () if file.match("*.dist-info/RECORD")]
    record = Path(str(installed.locate_file(records[0]))) if records else None
    folders = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    if record is None or record.parent.parent.resolve() not in folders:
        raise AutoloadError(
            f"slothplug is installed in {installed.locate_file('')}, which is no folder whose .pth files Python reads. "
            f"Use 'slothplug run' there."
        )
    return record


def _enter(record: Path, *, present: bool) -> None:
    lines = [line for line in record.read_text(encoding="utf-8").splitlines() if line != _ENTRY]
    record.write_text("\n".join([*lines, *[_ENTRY] * present]) + "\n", encoding="utf-8")
