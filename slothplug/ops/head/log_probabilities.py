"""``log_softmax`` of lazy logits, for trainers that make the entropy of every token of it and read nothing else.

TRL's trainers compute ``-(exp(log_p) * log_p).sum(-1)``. The operations on the way are put off like the logits, and the
sum is what the loss recorded (``statistics_policy``), or computed from logits a chunk at a time. Any other operation on
the way gets the values, as with logits.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch

from slothplug.ops.head.lazy_tensor import LazyTensor, aten
from slothplug.ops.head.lazy_value import LazyValue, Step

_Form = Literal["log p", "p", "p log p"]


class LazyLogProbabilities(LazyTensor):
    """One of three functions of the logits, by ``_form``. Has no graph."""

    _logits: LazyValue
    _form: _Form

    @classmethod
    def of(cls, logits: LazyValue, form: _Form) -> Self:
        """The function ``form`` of ``logits`` ``[..., V]``, over the last dimension."""
        self = cls._make(logits.after(Step(_VALUES[form], meta=torch.empty_like(logits.meta))))
        self._logits, self._form = logits, form
        return self

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._value.is_computed:
            return None
        if func is aten.exp.default and self._form == "log p":
            return LazyLogProbabilities.of(self._logits, "p")
        if func is aten.mul.Tensor and self._is_the_other_factor(args[0]):
            return LazyLogProbabilities.of(self._logits, "p log p")
        if func is aten.sum.dim_IntList and self._form == "p log p":
            return self._negative_entropy(*args, **kwargs)
        return None

    def _is_the_other_factor(self, factor: object) -> bool:
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


def _log_p(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1)


def _p_log_p(logits: torch.Tensor) -> torch.Tensor:
    log_p = _log_p(logits)
    return log_p.exp() * log_p


_VALUES = {"log p": _log_p, "p": lambda logits: _log_p(logits).exp(), "p log p": _p_log_p}
