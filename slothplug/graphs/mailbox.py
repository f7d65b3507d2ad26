"""Memory at fixed addresses through which tensors enter and leave recordings.

Nothing that a caller gets is memory of a recording, and nothing that a recording reads is the caller's: values are
copied in before a replay and out after it. The boxes are shared by all units of a model, since each is emptied before
the next unit runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from slothplug.graphs.signature import Layout, shortened, stored


class Mailbox:
    """The boxes of one device."""

    def __init__(self) -> None:
        self._boxes: dict[Hashable, torch.Tensor] = {}
        self._loaded: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def box(self, purpose: Hashable, layout: Layout, like: torch.Tensor) -> torch.Tensor:
        """The box for tensors of a layout and of the dtype of ``like``; its address never changes."""
        key = purpose, layout, like.dtype
        if key not in self._boxes:
            shape, stride = layout
            self._boxes[key] = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
        return self._boxes[key]

    def flat(self, purpose: Hashable, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A box of ``size`` elements."""
        key = purpose, size, dtype, device
        if key not in self._boxes:
            self._boxes[key] = torch.empty(size, dtype=dtype, device=device)
        return self._boxes[key]

    def load(self, boxes: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], rest: float = 0) -> None:
        """Copies each tensor into its box; those that are there already, unchanged, are not copied again.

        Args:
            rest: what the box of a longer sequence holds after the end of the tensor's.
        """
        for box, tensor in zip(boxes, tensors, strict=True):
            known = self._loaded.get(id(box))
            if known is not None and known[0]() is tensor and known[1] == tensor._version:
                continue
            part = shortened(box, tensor.shape)
            if part is not box:
                _fill(box, tensor.shape, rest)
            stored(part).copy_(stored(tensor.detach()))
            self._loaded[id(box)] = weakref.ref(tensor), tensor._version

    def forget(self) -> None:
        """Every tensor is to be copied again: a version does not tell of writes through ``.data`` between two calls."""
        self._loaded.clear()


def _fill(box: torch.Tensor, shape: torch.Size, rest: float) -> None:
    """Fills what follows the end of a sequence of this shape.

    Of a mask: positions before the end do not see those after it, which see all, since a row that sees nothing is NaN.
    """
    if sum(size != whole for size, whole in zip(shape, box.shape, strict=True)) < 2:
        box.fill_(rest)
        return
    box.fill_(True)
    box[..., : shape[-2], shape[-1] :] = False
