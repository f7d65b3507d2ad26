"""All that a plugin's author imports. These names, their arguments and meanings change in a new minor version only, and
the changelog says so; a module that they come from may move at any time.

A plugin is a module, or an object, with functions marked ``hookimpl`` whose names and parameters are those of
``slothplug.hookspecs``. docs/plugins.md has two whole ones.

- ``hookimpl`` marks a hook.
- ``Operation``, ``Kernel``, ``Site``, ``Left``, ``Refusal`` are what hooks answer with; ``kernel_for`` asks all plugins
  for a kernel.
- ``Served`` is what a served module's fast forward is given; ``SharedState`` what an operation's modules of one model
  share.
- ``device_of``, ``dtype_of``, ``plain``, ``why_not_touchable`` are questions about a module, ``why_not_input``,
  ``why_not_now`` and ``OTHER_ARGUMENTS`` about a call.
- ``twin``, ``probe_rows``, ``difference`` make a proof.
- ``Watch`` and ``facts_of``: what is decided once for each call of the model (``Site.bind``), and what was;
  ``UNWATCHED`` takes the place of a ``Watch`` where a call decides for itself.
"""

from slothplug.hookspecs import hookimpl
from slothplug.patching.forward_context import facts_of
from slothplug.patching.model_context import SharedState
from slothplug.patching.predicates import (
    OTHER_ARGUMENTS,
    device_of,
    dtype_of,
    plain,
    why_not_input,
    why_not_touchable,
)
from slothplug.patching.proof import difference, probe_rows
from slothplug.patching.served import Served
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.patching.transforms import why_not_now
from slothplug.patching.twin import twin
from slothplug.patching.watch import UNWATCHED, Watch
from slothplug.plugins import kernel_for

__all__ = [
    "OTHER_ARGUMENTS",
    "UNWATCHED",
    "Kernel",
    "Left",
    "Operation",
    "Refusal",
    "Served",
    "SharedState",
    "Site",
    "Watch",
    "device_of",
    "difference",
    "dtype_of",
    "facts_of",
    "hookimpl",
    "kernel_for",
    "plain",
    "probe_rows",
    "twin",
    "why_not_input",
    "why_not_now",
    "why_not_touchable",
]
