"""Who reads each token's entropy or most likely word after the loss, as TRL's trainers do; learnt from call to call.

Both come from the softmax that the loss computes anyway. So where a head's logits were read in this way, its next loss
writes them down, and the reader gets them without logits. A loss whose notes nobody read is the last that takes any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slothplug.kernels.cross_entropy import RowStatistics

# More than one block of a row kernel.
_PROBE_ROWS, _PROBE_FEATURES, _PROBE_VOCABULARY = 5, 8, 40000


class Readers:
    """The readers of one head."""

    def __init__(self) -> None:
        self._expected = self._unread = False
        self._proved: bool | None = None

    def expect(
        self, loss: Callable[..., torch.Tensor], rows: int, device: torch.device, dtype: torch.dtype
    ) -> RowStatistics | None:
        """Room for what ``loss`` is to write down of ``rows`` rows; None where nobody is expected to read it.

        The first time, ``loss`` (``kernels.linear_cross_entropy``) is tried on small operands of this dtype and device,
        and waited for. One that writes something else, or takes no ``statistics``, is never asked again.
        """
        self._unread = self._expected = self._expected and not self._unread
        if not self._expected or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        if self._proved is None:
            self._proved = _writes_statistics(loss, device, dtype)
        return RowStatistics.empty(rows, device) if self._proved else None

    def note(self) -> None:
        """Somebody reads."""
        self._expected, self._unread = True, False


def _writes_statistics(loss: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Compares with stock on small integers: their products and sums are exact in every dtype, and ties are ties."""
    generator = torch.Generator().manual_seed(0)

    def integers(rows: int) -> torch.Tensor:
        drawn = torch.randint(-3, 4, (rows, _PROBE_FEATURES), generator=generator, device="cpu")
        return drawn.to(device, dtype)

    hidden, weight = integers(_PROBE_ROWS), integers(_PROBE_VOCABULARY)
    labels = torch.zeros(_PROBE_ROWS, dtype=torch.int64, device=device)
    found, epilogue = RowStatistics.empty(_PROBE_ROWS, device), (("mul", 0.25), ("cast", torch.float32))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            loss(hidden, weight, labels, reduction="sum", epilogue=epilogue, statistics=found)
        except Exception:  # a plugin's kernel may take none, or not this dtype
            return False
        logits = (hidden.double() @ weight.double().t()) / 4
        log_p = torch.log_softmax(logits, 1)
        same = torch.isclose(found.entropy.double(), -(log_p.exp() * log_p).sum(1), rtol=1e-4, atol=1e-5)
        return bool((same & (found.argmax == logits.argmax(1))).all())
