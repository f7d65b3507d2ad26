"""One training step of a small model, and which of its modules and functions that step reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

IDS = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(0), device="cpu")
LABELS = torch.where(torch.arange(16, device="cpu") < 4, -100, IDS)


class Step(NamedTuple):
    """Loss and gradients of one training step, detached."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


class Distance(NamedTuple):
    """How far one step is from another: of the loss, and of the gradient tensor that differs most."""

    loss: float
    """|difference| over max(1, |loss|)."""
    gradient: float
    """Largest |difference| over the largest |gradient| of the model; infinite where other parameters have gradients."""


def train_step(model: nn.Module, **inputs: Any) -> Step:
    """One seeded step in training mode on 2 x 16 tokens, of which the first four of each row are ignored.

    ``inputs`` are passed on to the model, and come before these tokens.

    Raises:
        ValueError: the loss is not finite.
    """
    model.train()
    model.zero_grad()
    transformers.set_seed(7)  # BigBird draws its sparse blocks from NumPy's generator
    output = model(**{"input_ids": IDS, "labels": LABELS, "use_cache": False, **inputs})
    loss = output.loss if hasattr(output, "loss") else output[0]
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError("the small model's loss is not finite")
    return Step(loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


@torch.no_grad()
def round_weights_again(model: nn.Module) -> None:
    """Moves every weight to the next larger or smaller number, as another order of roundings may move a value."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            up = torch.rand(parameter.shape, generator=generator, device="cpu").to(parameter.device) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))


def distance(step: Step, reference: Step) -> Distance:
    """Of ``step`` from ``reference``."""
    loss = abs(float(step.loss) - float(reference.loss)) / max(1.0, abs(float(reference.loss)))
    if step.gradients.keys() != reference.gradients.keys():
        return Distance(loss, float("inf"))
    largest = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    worst = max(float((step.gradients[name] - g).abs().max()) for name, g in reference.gradients.items())
    return Distance(loss, worst / largest)


class Reached:
    """Records, while it is entered, what runs forward and backward.

    Seen from the interpreter (``sys.setprofile``), so that a module whose ``forward`` is called past ``__call__``, and
    a function called under any name, are seen too.

    Attributes:
        modules: those whose forward ran and whose output got a gradient.
        callers: those in whose forward, or deeper, one of ``functions`` ran and its output got a gradient.
    """

    def __init__(self, functions: Collection[CodeType]) -> None:
        self.functions = frozenset(functions)
        self.modules: set[nn.Module] = set()
        self.callers: set[nn.Module] = set()

    def __enter__(self) -> Reached:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, returned: Any) -> None:
        if event != "return":
            return
        if frame.f_code in self.functions:
            _at_gradient(returned, partial(self.callers.update, _modules_from(frame)))
        elif frame.f_code.co_name == "forward" and isinstance(module := _self_of(frame), nn.Module):
            _at_gradient(returned, partial(self.modules.add, module))


def _at_gradient(returned: Any, action: Callable[[], None]) -> None:
    """Runs ``action`` when a gradient reaches one of the tensors that were returned."""
    for tensor in returned if isinstance(returned, (tuple, list)) else (returned,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: action())


def _self_of(frame: FrameType) -> object:
    names = frame.f_code.co_varnames
    return frame.f_locals.get("self") if names and names[0] == "self" else None


def _modules_from(frame: FrameType) -> set[nn.Module]:
    """The modules whose methods are running, from ``frame`` outwards."""
    found: set[nn.Module] = set()
    outer: FrameType | None = frame
    while outer is not None:
        module = _self_of(outer)
        if isinstance(module, nn.Module):
            found.add(module)
        outer = outer.f_back
    return found
