"""Whether the losses of one head record each token's entropy and most likely token, which some trainers read.

Both come from the softmax that the loss computes anyway. A trainer that reads them is known when it is built
(``integrations.hf.callback``): ``record_statistics`` then proves, for each head, that its kernel records what stock
computes, and from then on its losses do. Every row takes part in the loss's products meanwhile, ignored ones too, for a
reader may look at them. If nobody reads one loss's statistics, later losses stop recording them.

Where they were not recorded, they are computed from logits a chunk at a time, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from slothplug.kernels.cross_entropy import RowStatistics
from slothplug.patching.precision import stock_modes
from slothplug.patching.predicates import device_of, dtype_of
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Refusal

# More than one block of a row kernel.
_PROBE_ROWS, _PROBE_FEATURES, _PROBE_VOCABULARY = 5, 8, 40000
_IGNORED = -100

UNDECLARED = Refusal("no trainer that reads them was declared (slothplug.ops.head.record_statistics)")
_UNREAD = Refusal("an earlier loss recorded them and nobody read them")
_FLOAT64 = Refusal("float64 logits: they are recorded in float32")


class StatisticsPolicy:
    """The policy of one head."""

    def __init__(self) -> None:
        self._verdicts: dict[torch.dtype, Refusal | None] = {}
        """By dtype of the logits: why losses record nothing, or None where they do."""
        self._unread = False

    def expect(
        self, loss: Callable[..., torch.Tensor], device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Refusal | None:
        """Has losses record statistics where logits are of one of ``dtypes``.

        Compares what ``loss`` (``kernels.linear_cross_entropy``) records with stock's, which compiles and waits.
        Returns why it records nothing for one of the dtypes, or None.
        """
        self._unread = False
        with stock_modes(device):
            self._verdicts = {dtype: _why_not_recorded_by(loss, device, dtype) for dtype in dtypes}
        return next(filter(None, self._verdicts.values()), None)

    def why_not(self, dtype: torch.dtype) -> Refusal | None:
        """Why a loss of logits of ``dtype`` records nothing; None where it does."""
        return self._verdicts.get(dtype, UNDECLARED)

    def room(self, rows: int, device: torch.device, dtype: torch.dtype) -> RowStatistics | None:
        """Room for what a loss of ``rows`` rows is to record; None where it is to record nothing."""
        if torch._C._current_graph_task_id() == -1:  # a checkpoint's second forward does what its first did
            if self._unread:
                self._verdicts = dict.fromkeys(self._verdicts, _UNREAD)
            self._unread = self.why_not(dtype) is None
        return RowStatistics.empty(rows, device) if self.why_not(dtype) is None else None

    def note_read(self) -> None:
        """Called when somebody reads a loss's statistics."""
        self._unread = False


def record_statistics(model: nn.Module) -> list[str]:
    """Has the served heads of ``model`` record entropy and most likely token of every token in their losses.

    For trainers that read both of every batch. Call it once, after the patch: it waits for the device.

    Returns:
        A sentence for the report on each head that is not going to record them.
    """
    notes = []
    for module in model.modules():
        served = module.__dict__.get(STATE)
        if isinstance(served, Served) and isinstance(policy := getattr(served.spec, "policy", None), StatisticsPolicy):
            device, dtype = device_of(module), dtype_of(module)
            dtypes = tuple(dict.fromkeys((dtype, torch.get_autocast_dtype(device.type))))
            if refusal := policy.expect(served.kernel, device, dtypes):
                notes.append(f"{served.name}: entropy and argmax are computed from logits: {refusal.reason}")
    return notes


def _why_not_recorded_by(loss: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> Refusal | None:
    """Compares with stock on small integers: their products and sums are exact in every dtype, and ties are ties."""
    if dtype is torch.float64:
        return _FLOAT64
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
        except Exception as error:  # a plugin's kernel may record none, or not in this dtype
            return Refusal(f"the loss's kernel cannot record them in {dtype} ({type(error).__name__}: {error})")
        if not torch.isclose(found.entropy.double(), entropy, rtol=1e-4, atol=1e-5).all():
            return Refusal(f"the loss's kernel records another entropy in {dtype}")
        if not torch.equal(found.argmax, log_p.argmax(1)):
            return Refusal(f"the loss's kernel records another token in {dtype}")
    return None
