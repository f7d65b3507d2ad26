"""Two runs of a framework, one with the flag and one without: what they logged and saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import pytest
import torch

TOLERANCE = 1e-5
"""Of what is logged: losses, gradient norms and what follows from them, in float32."""


class Run(Protocol):
    """A finished run."""

    def logged(self, key: str) -> list[float]:
        """The values of ``key`` in the order in which they were logged."""

    def weights(self) -> dict[str, torch.Tensor]:
        """The saved weights."""


def assert_equal_runs(on: Run, off: Run, logged: Iterable[str], weights: float) -> None:
    """What was logged to ``TOLERANCE``, and the saved weights to ``weights`` and the same fraction of themselves."""
    for key in ("loss", "grad_norm", *logged):
        ours, stock = on.logged(key), off.logged(key)
        assert stock, f"{key} was not logged"
        assert ours == pytest.approx(stock, rel=TOLERANCE, abs=TOLERANCE), key
    saved, expected = on.weights(), off.weights()
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            saved[name], weight, rtol=TOLERANCE, atol=weights, msg=lambda text, name=name: f"{name}: {text}"
        )
