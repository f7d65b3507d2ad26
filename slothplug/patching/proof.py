"""The probe's comparison: a candidate and the original, on the same inputs, forward and every gradient.

A probe is no measurement of exactness (the tests do that); it answers one question: do these two compute the same
function? So its bounds are a few units of the dtype, scaled by each row's own largest value, so that a wrong ``eps``
shows in rows of rms 1e-3 and a wrong cast order in a half-precision dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slothplug.patching.sites import Refusal

PROBE_RMS = (1e-3, 1.0, 1e3)
"""Row scales of a probe's activations."""

# Largest |difference| over the largest |value| of its row. A probe's sums have at most a few thousand terms.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}

Function = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


def difference(
    candidate: Function,
    original: Function,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    computed_in: torch.dtype | None = None,
) -> Refusal | None:
    """Why ``candidate`` is not ``original``, or None where they agree.

    Both are called with ``inputs`` and may read ``weights``, tensors that require grad and that both share. Outputs are
    compared, then the gradients of one random projection of them with respect to every input and weight that requires
    grad. ``computed_in`` is the dtype that both round to on the way where that is less exact than the tensors' own, as
    under autocast.

    Returns:
        A refusal that names the tensor and the size of the difference; None where they agree.
    """
    wanted = [tensor for tensor in (*inputs, *weights) if tensor.requires_grad]
    ours, stock = _run(candidate, inputs), _run(original, inputs)
    if len(ours) != len(stock):
        return Refusal(f"{len(ours)} outputs where the original has {len(stock)}")
    for index, (got, expected) in enumerate(zip(ours, stock, strict=True)):
        if refusal := _unequal(f"output {index}", got, expected, computed_in):
            return refusal
    if not wanted:
        return None
    projections = [torch.randn_like(tensor) for tensor in stock]
    our_grads = torch.autograd.grad(ours, wanted, projections, allow_unused=True)
    stock_grads = torch.autograd.grad(stock, wanted, projections, allow_unused=True)
    for index, (got, expected) in enumerate(zip(our_grads, stock_grads, strict=True)):
        if (got is None) != (expected is None):
            return Refusal(f"gradient {index}: {'missing' if got is None else 'present'}, unlike the original's")
        if got is None or expected is None:
            continue
        if refusal := _unequal(f"gradient {index}", got, expected, computed_in):
            return refusal
    return None


def _run(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    output = function(*inputs)
    return [output] if isinstance(output, torch.Tensor) else list(output)


def _unequal(name: str, got: torch.Tensor, expected: torch.Tensor, computed_in: torch.dtype | None) -> Refusal | None:
    if got.shape != expected.shape:
        return Refusal(f"{name}: shape {tuple(got.shape)} where the original has {tuple(expected.shape)}")
    if got.dtype != expected.dtype:
        return Refusal(f"{name}: dtype {got.dtype} where the original has {expected.dtype}")
    scale = expected.detach().double().abs()
    scale = scale.amax(-1, keepdim=True) if scale.ndim else scale
    error = ((got - expected).detach().double().abs() / scale.clamp_min(1e-30)).max().item()
    tolerance = max(_TOLERANCE[expected.dtype], _TOLERANCE[computed_in or expected.dtype])
    if error <= tolerance:
        return None
    return Refusal(
        f"{name} differs from the original's by {error:.1e} of its row's largest value (allowed: {tolerance:.0e})"
    )


def probe_rows(
    size: int, dtype: torch.dtype, device: torch.device, scales: tuple[float, ...] = PROBE_RMS
) -> torch.Tensor:
    """Random activations ``[1, rows, size]`` that require grad, with rows of each rms in ``scales``, twice."""
    rows = torch.tensor(scales * 2, device=device).view(1, -1, 1)
    return (torch.randn(1, rows.numel(), size, device=device) * rows).to(dtype).requires_grad_()
