"""The gradients of a recorded backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slothplug.graphs.signature import dense


class Gradients:
    """Where a recorded backward leaves its gradients: one box for each dtype, of which callers get parts of a copy."""

    def __init__(self, grads: Sequence[torch.Tensor | None], mailbox: Any) -> None:
        self._places: list[tuple[torch.dtype, torch.Size, int] | None] = []
        sizes: dict[torch.dtype, int] = {}
        for grad in grads:
            if grad is None:
                self._places.append(None)
                continue
            begin = sizes.get(grad.dtype, 0)
            self._places.append((grad.dtype, grad.shape, begin))
            sizes[grad.dtype] = begin + -(-grad.numel() // 64) * 64
        device = next(grad.device for grad in grads if grad is not None)
        self._boxes = {dtype: mailbox.flat("gradients", size, dtype, device) for dtype, size in sizes.items()}

    def put(self, grads: Sequence[torch.Tensor | None]) -> None:
        sources = [grad for grad in grads if grad is not None]
        targets = [part for part in self._parts(self._boxes) if part is not None]
        torch._foreach_copy_(targets, sources)

    def delivered(self) -> list[torch.Tensor | None]:
        return self._parts({dtype: box.clone() for dtype, box in self._boxes.items()})

    def _parts(self, boxes: Mapping[torch.dtype, torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            None if place is None else boxes[place[0]].as_strided(place[1], dense(place[1]), place[2])
            for place in self._places
        ]
