"""A float64 reference of any model: its own forward, in which every mention of float32 means float64.

``model.double()`` alone is no reference: norms, rotary embeddings, softmax and loss of transformers convert to float32
whatever dtype they are given. Inside ``Float64`` those conversions lead to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}


class Float64(TorchFunctionMode):
    """While active, a half or single precision dtype given to any torch function is replaced by float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        args = [_widened(value) for value in args]
        return func(*args, **{key: _widened(value) for key, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value
