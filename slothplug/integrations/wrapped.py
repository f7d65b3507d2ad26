"""Wraps a function of a framework in its own module, once, and restores it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MARK = "_slothplug_original"


def wrap(home: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``home.name`` by ``make(home.name)``. Does nothing if it is wrapped."""
    module = sys.modules[home]
    original = getattr(module, name)
    if not hasattr(original, _MARK):
        wrapper = make(original)
        setattr(wrapper, _MARK, original)
        setattr(module, name, wrapper)


def unwrap(home: str, name: str) -> None:
    """Puts back what ``wrap`` replaced. Does nothing if it is not wrapped."""
    module = sys.modules.get(home)
    original = getattr(getattr(module, name, None), _MARK, None)
    if original is not None:
        setattr(module, name, original)
