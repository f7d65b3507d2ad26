"""LLaMA-Factory: ``use_fast_kernels`` and ``use_unsloth`` in its configuration, served in each of its training stages.

Importing this changes nothing. ``run_exp`` is LLaMA-Factory's with the flags; ``slothplug run`` and ``slothplug
autoload`` wrap what ``slothplug.integrations.llamafactory.frontdoor`` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slothplug.integrations.llamafactory.training import run_exp

__all__ = ["run_exp"]


def __getattr__(name: str) -> Any:
    # On first use: the front door is imported while llamafactory.train.tuner, which this needs, is half imported.
    if name != "run_exp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slothplug.integrations.llamafactory.training import run_exp

    return run_exp
