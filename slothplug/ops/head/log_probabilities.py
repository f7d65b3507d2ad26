"""``log_softmax`` of lazy logits, for those who make the entropy of every token of it and read nothing else.

TRL's trainers compute ``-(exp(log_p) * log_p).sum(-1)``. The operations on the way are put off like the logits, and the
sum is taken from what the loss wrote down (``ops.head.statistics_policy``), or from logits made a chunk at a time.
Whoever reads anything in between gets the values, as with logits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from slothplug.ops.head.lazy_logits import LazyLogits
from slothplug.ops.head.lazy_value import Deferred, Step, aten

_Form = Literal["log p", "p", "p log p"]


class LazyLogProbabilities(LazyLogits):
    """One of three functions of the logits, by ``_form``. Has no graph. Made by ``put_off``."""

    _logits: Deferred
    _form: _Form

    @staticmethod
    def __new__(cls, logits: Deferred, form: _Form) -> LazyLogProbabilities:
        step = Step(_VALUES[form], meta=torch.empty_like(logits.meta))
        self = super().__new__(cls, logits.after(step), fusable=False)
        assert isinstance(self, LazyLogProbabilities)
        self._logits, self._form = logits, form
        return self

    def _put_off_further(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._deferred.is_real:
            return None
        if func is aten.exp.default and self._form == "log p":
            return LazyLogProbabilities(self._logits, "p")
        if func is aten.mul.Tensor and self._is_the_other_of(args[0]):
            return LazyLogProbabilities(self._logits, "p log p")
        if func is aten.sum.dim_IntList and self._form == "p log p":
            return self._negative_entropy(*args, **kwargs)
        return None

    def _is_the_other_of(self, factor: object) -> bool:
        if not isinstance(factor, LazyLogProbabilities) or factor._logits is not self._logits:
            return False
        return {self._form, factor._form} == {"log p", "p"}

    def _negative_entropy(
        self, dims: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        if dims not in ([-1], [self.ndim - 1]) or keepdim:
            return None
        if dtype not in (None, self.dtype, torch.float32):  # autocast on a GPU asks for float32
            return None
        found = self._logits.entropy()
        return -found.to(dtype or self.dtype)


def put_off(logits: LazyLogits, dim: int, half_to_float: bool) -> LazyLogProbabilities | None:
    """``log_softmax(logits, dim)``; None where a graph would need it, or its values."""
    if half_to_float or dim not in (-1, logits.ndim - 1) or logits._deferred.is_real or logits.numel() == 0:
        return None
    if torch.is_grad_enabled() and logits.requires_grad:
        return None
    return LazyLogProbabilities(logits._deferred, "log p")


def _log_p(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1)


def _p_log_p(logits: torch.Tensor) -> torch.Tensor:
    log_p = _log_p(logits)
    return log_p.exp() * log_p


_VALUES = {"log p": _log_p, "p": lambda logits: _log_p(logits).exp(), "p log p": _p_log_p}
