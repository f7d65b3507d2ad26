"""Wraps a function of a framework in its own module, once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MARK = "_slothplug_wrapped"


def wrap(home: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``home.name`` by ``make(home.name)``. Does nothing if it is wrapped."""
    module = sys.modules[home]
    original = getattr(module, name)
    if not hasattr(original, _MARK):
        wrapper = make(original)
        setattr(wrapper, _MARK, True)
        setattr(module, name, wrapper)
