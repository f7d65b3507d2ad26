"""Cached launch plans: bounded, of shapes and strides alone, and right for tensors that differ in what Triton reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from slothplug.kernels.glu import glu
from slothplug.kernels.linear_cross_entropy import linear_cross_entropy
from slothplug.kernels.rms_norm import Variant, rms_norm
from slothplug.kernels.rotary import rotary
from slothplug.kernels.triton import cross_entropy as triton_cross_entropy
from slothplug.kernels.triton import four_bit as triton_four_bit
from slothplug.kernels.triton import glu as triton_glu
from slothplug.kernels.triton import launch
from slothplug.kernels.triton import rms_norm as triton_rms_norm
from slothplug.kernels.triton import rotary as triton_rotary

PLANS = [
    triton_cross_entropy._rows_plan,
    triton_cross_entropy._scale_plan,
    triton_four_bit._plan,
    triton_glu._plan,
    triton_rms_norm._forward_plan,
    triton_rms_norm._add_forward_plan,
    triton_rms_norm._backward_plan,
    triton_rotary._plan,
]


def tensors_in(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(tensors_in, value))
    return isinstance(value, torch.Tensor)


def test_caches_are_bounded_whatever_lengths_come() -> None:
    for plan in PLANS:
        assert plan.cache_parameters()["maxsize"] == launch._PLANS
    variant = Variant(1e-6, 0.0, "after_weight")
    for length in range(1, launch._PLANS + 10):
        triton_rms_norm._forward_plan((length, 8), (8, 1), (8, 1), (1,), variant)
    assert triton_rms_norm._forward_plan.cache_info().currsize == launch._PLANS


def test_a_second_launch_prepares_nothing_and_reads_the_tensors_it_is_given(device: torch.device) -> None:
    def step(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(3, 40, device=device, requires_grad=True)
        weight, up = (torch.randn(size, device=device) for size in ((40,), (3, 40)))
        q = torch.randn(1, 2, 3, 8, device=device)
        cos, sin = torch.randn(2, 1, 3, 8, device=device)
        labels = torch.tensor([1, 2, 3], device=device)
        head = torch.randn(7, 40, device=device)

        def run(backend: Any) -> list[torch.Tensor]:
            y = rms_norm(x, weight, 1e-6, backend=backend)
            h = glu(y, up, activation="silu", backend=backend)
            loss = linear_cross_entropy(h, head, labels, backend=backend)
            rotated = rotary(q, None, cos, sin, backend=backend)[0]
            return [y, h, loss, rotated, torch.autograd.grad(loss, x)[0]]

        for got, expected in zip(run("triton"), run("torch"), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        return [x]

    kept = [step(0)]  # whose memory is not used again by the second step
    misses = [plan.cache_info().misses for plan in PLANS]
    kept.append(step(1))
    assert [plan.cache_info().misses for plan in PLANS] == misses


def test_plans_hold_no_tensor(device: torch.device) -> None:
    found: list[launch.Plan] = []
    original = launch.launch

    def record(plan: launch.Plan, *arguments: Any) -> None:
        found.append(plan)
        original(plan, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_cross_entropy, triton_glu, triton_rms_norm, triton_rotary):
            patch.setattr(module, "launch", record)
        x = torch.randn(2, 40, device=device, requires_grad=True)
        y = rms_norm(x, torch.ones(40, device=device), 1e-6, backend="triton")
        out = glu(y, y, activation="gelu", backend="triton")
        class_weight = torch.ones(5, device=device)
        linear_cross_entropy(
            out,
            torch.randn(5, 40, device=device),
            torch.tensor([1, 2], device=device),
            class_weight=class_weight,
            label_smoothing=0.1,
            backend="triton",
        ).backward()
        rotary(x.view(1, 1, 2, 40), None, *torch.ones(2, 1, 2, 40, device=device), backend="triton")
    assert len(found) >= 6
    assert not any(tensors_in(plan.arguments) for plan in found)


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("columns", [1, 16, 40, 41])
def test_one_plan_serves_any_alignment(columns: int, offset: int, device: torch.device) -> None:
    """Triton compiles one code for addresses that are multiples of 16 bytes, and another for the rest."""
    storage = torch.randn(3 * columns + 8, device=device)
    x = storage[offset : offset + 3 * columns].view(3, columns)
    torch.testing.assert_close(rms_norm(x, None, 1e-6, backend="triton"), rms_norm(x, None, 1e-6), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(glu(x, x, activation="silu", backend="triton"), glu(x, x, activation="silu"))


def test_strides_are_part_of_a_plan(device: torch.device) -> None:
    wide = torch.randn(3, 80, device=device)
    for x in (wide[:, :40], wide[:, 40:].contiguous(), wide[:, ::2], wide[:1, :40].expand(3, 40)):
        torch.testing.assert_close(
            rms_norm(x, None, 1e-6, backend="triton"), rms_norm(x, None, 1e-6), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(glu(x, x, activation="silu", backend="triton"), glu(x, x, activation="silu"))
