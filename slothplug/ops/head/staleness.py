"""Whether the weights that put-off logits are computed from have been stepped by an optimizer since the head's call.

A parameter's ``_version`` does not tell: fused optimizers and writes through ``.data`` leave it as it was. Nor do the
parameters that an optimizer holds tell it alone: DeepSpeed and other engines step copies in float32 and write the
model's weights afterwards. So, before an optimizer steps:

- where its groups hold one of the weights, with a gradient, the logits are stale;
- otherwise a fingerprint of the weights is computed, without a wait. Who reads the logits later compares it.

The second costs one pass over the weights, 2 bytes of traffic a bfloat16 element and about 24 for its sums, and only
where somebody holds put-off logits while an optimizer without a share in the head steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22
"""Elements that are hashed at once; each takes 16 bytes meanwhile."""


class WatchedWeights:
    """The trained weights of one head's call, from the end of the call on."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._change = ""
        self._before: list[torch.Tensor] = []
        """The weights' fingerprints before the first step that may have changed them."""
        _before_steps.watch(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what is going to be known of the weights when ``optimizer`` has stepped."""
        if self._change:
            return
        if is_freed(self._weights):
            self._change = "the output head's sharded weights were freed"
        elif self._steps(optimizer) or is_captured(self._weights[0].device):
            self._change = "an optimizer stepped"
        elif not self._before:
            self._before = [fingerprint(weight) for weight in self._weights]

    def change(self) -> str:
        """What happened to the weights, in words; empty where they are what they were. May wait for the device."""
        if self._before and not self._change and not is_freed(self._weights):
            now = [fingerprint(weight) for weight in self._weights]
            if not all(map(torch.equal, now, self._before)):
                self._change = "an optimizer stepped"
        return self._change

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` holds one of the weights and has a gradient for it."""
        watched = {id(weight) for weight in self._weights}
        return any(
            id(parameter) in watched and parameter.grad is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        )


class _BeforeSteps:
    """The hook that asks the watched weights before every optimizer's step, from the first of them on.

    torch gets the hook once and keeps it as long as the process lives, also when every model is undone: logits outlive
    the undo and even their model, and must raise after a step all the same. Nor could the hook be removed when the last
    logits are collected: that may happen while torch walks through its hooks, and would break the step. The hook holds
    weak references only.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[WatchedWeights] = weakref.WeakSet()
        self._registered = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for weights in list(self._watched):
            weights.before_step(optimizer)

    def watch(self, weights: WatchedWeights) -> None:
        self._watched.add(weights)
        if not self._registered:
            register_optimizer_step_pre_hook(self)
            self._registered = True


_before_steps = _BeforeSteps()


def is_freed(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of one of the weights was freed, as FSDP2 does with what it gathered."""
    return any(weight.untyped_storage().nbytes() == 0 for weight in weights)


def fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of ``weight`` ``[V, H]`` or ``[V]``, int64 and 0-d, on its device; computed without a wait.

    The sum over all elements of their bits times two pseudo-random odd numbers, one of the row and one of the column,
    modulo 2^64. Equal weights have equal hashes; two different ones have with a probability of about 2^-64.
    """
    bits = weight.detach().view(_BITS[weight.element_size()])
    bits = bits.unsqueeze(-1) if bits.ndim == 1 else bits
    rows, columns = bits.shape
    of_rows, of_columns = _odd_numbers(rows, weight.device), _odd_numbers(columns, weight.device)
    step = max(1, _CHUNK // columns)
    total = of_rows.new_zeros(())
    for part, factors in zip(bits.split(step), of_rows.split(step), strict=True):
        total += ((part * of_columns).sum(1) * factors).sum()
    return total


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """``[count]`` int64: the integers from 1 on through a mixing function, made odd."""
    mixed = torch.arange(1, count + 1, device=device) * -7046029254386353131  # 2^64 over the golden ratio
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return (mixed ^ (mixed >> 29)) | 1


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
