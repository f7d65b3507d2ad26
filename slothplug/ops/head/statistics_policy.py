"""Who reads each token's entropy or most likely word after the loss, as TRL's trainers do; learnt from call to call.

Both come from the softmax that the loss computes anyway. So where a head's logits were read in this way, its next loss
writes them down, and the reader gets them without logits. A loss whose notes nobody read is the last that takes any.
Every row then takes part in the loss's products, ignored ones too, for a reader may look at them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from slothplug.kernels.cross_entropy import RowStatistics

logger = logging.getLogger("slothplug")

# More than one block of a row kernel.
_PROBE_ROWS, _PROBE_FEATURES, _PROBE_VOCABULARY = 5, 8, 40000
_IGNORED = -100


class Readers:
    """The readers of one head."""

    def __init__(self) -> None:
        self._expected = self._unread = self._writes = False
        self._proved: dict[tuple[torch.device, torch.dtype], bool] = {}

    def expect(self, rows: int, device: torch.device, dtype: torch.dtype) -> RowStatistics | None:
        """Room for what a loss of ``rows`` rows is to write down; None where nobody is expected to read it."""
        if torch._C._current_graph_task_id() == -1:  # in a checkpoint's second forward, as in its first
            self._unread = self._expected = self._expected and not self._unread
            self._writes = self._expected and self._proved.get((device, dtype), False)
        return RowStatistics.empty(rows, device) if self._writes else None

    def note(self, loss: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Somebody reads what ``loss`` (``kernels.linear_cross_entropy``) could have written down.

        The first time that is proved: where it writes something else, or takes no ``statistics``, it is not asked, and
        the log says so. Not when the model is patched, for it compiles and waits, and most runs have no such reader.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._expected, self._unread = True, False
        if (device, dtype) not in self._proved:
            # The proof is nobody else's: not of a checkpoint that the reader may be in, nor of inference mode.
            own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), own:
                reason = _why_not_statistics(loss, device, dtype)
            if reason is not None:
                logger.info("slothplug: entropy and argmax of the logits are computed from logits, for %s", reason)
            self._proved[device, dtype] = reason is None


def _why_not_statistics(loss: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> str | None:
    """Compares with stock on small integers: their products and sums are exact in every dtype, and ties are ties."""
    generator = torch.Generator().manual_seed(0)

    def integers(rows: int) -> torch.Tensor:
        drawn = torch.randint(-3, 4, (rows, _PROBE_FEATURES), generator=generator, device="cpu")
        return drawn.to(device, dtype)

    hidden, weight = integers(_PROBE_ROWS), integers(_PROBE_VOCABULARY)
    labels = torch.arange(_PROBE_ROWS, device=device)
    labels[1] = _IGNORED
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / 4, 1)
    entropy = -(log_p.exp() * log_p).sum(1)
    options = {"reduction": "sum", "epilogue": (("mul", 0.25), ("cast", torch.float32))}
    for trains in (True, False):
        found = RowStatistics.empty(_PROBE_ROWS, device)
        try:
            loss(hidden.requires_grad_(trains), weight, labels, statistics=found, **options)
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernel
        except Exception as error:  # a plugin's kernel may take none, or not this dtype
            return f"the loss's kernel cannot write them down ({type(error).__name__}: {error})"
        if not torch.isclose(found.entropy.double(), entropy, rtol=1e-4, atol=1e-5).all():
            return "the loss's kernel writes down another entropy"
        if not torch.equal(found.argmax, log_p.argmax(1)):
            return "the loss's kernel writes down another word"
    return None
