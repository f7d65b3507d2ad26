"""A copy of a function that reads another global: all else of it stays, through every wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slothplug.patching.rebind_globals import chain, global_names, rebuild

LIMIT, OTHER = 10, 20


def reads_limit(x: int, *, add: int = 1) -> int:
    """Adds."""
    return x + add + LIMIT


def test_rebuild_copies_what_makes_a_function() -> None:
    rebuilt = rebuild(reads_limit, "LIMIT", 100)
    assert rebuilt is not None
    assert (rebuilt(1), rebuilt(1, add=2), reads_limit(1)) == (102, 103, 12)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__", "__annotations__"):
        assert getattr(rebuilt, attribute) == getattr(reads_limit, attribute)


def test_rebuild_enters_partials_methods_and_nested_functions() -> None:
    class Holder:
        def method(self, x: int) -> int:
            return sum(y + LIMIT for y in [x])

    partial_copy = rebuild(functools.partial(reads_limit, add=5), "LIMIT", 100)
    method_copy = rebuild(Holder().method, "LIMIT", 100)
    assert partial_copy is not None
    assert method_copy is not None
    assert (partial_copy(1), method_copy(1)) == (106, 101)


def test_rebuild_returns_none_where_nothing_reads_the_name() -> None:
    def attribute_only(x: Any) -> Any:
        return x.LIMIT

    assert rebuild(reads_limit, "OTHER", 0) is None
    assert rebuild(attribute_only, "LIMIT", 0) is None
    assert rebuild(len, "LIMIT", 0) is None


def test_rebuild_shares_state_and_follows_a_wrapper_that_holds_itself() -> None:
    def counting(function: Callable[[int], int]) -> Callable[[int], int]:
        calls = 0

        @functools.wraps(function)
        def wrapper(x: int) -> int:
            nonlocal calls
            calls += 1
            wrapper.calls = calls  # type: ignore[attr-defined]
            return function(x)

        return wrapper

    stock = counting(reads_limit)
    rebuilt = rebuild(stock, "LIMIT", 100)
    assert rebuilt is not None
    assert (stock(1), rebuilt(1)) == (12, 102)
    assert (stock.calls, rebuilt.calls) == (1, 2)  # type: ignore[attr-defined]
    assert [link.__name__ for link in chain(rebuilt)] == ["reads_limit", "reads_limit"]
    assert "LIMIT" in global_names(chain(rebuilt)[-1])
