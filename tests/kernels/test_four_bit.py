"""4-bit weights are unpacked to the bits that bitsandbytes unpacks them to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slothplug.kernels.backend import why_not_triton
from slothplug.kernels.four_bit import dequantize_4bit

functional = pytest.importorskip("bitsandbytes").functional

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _has_triton(device: torch.device) -> None:
    if reason := why_not_triton(device):
        pytest.skip(reason)


def quantised(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(math.prod(shape))
    # Blocks of different sizes, one of them of zeros.
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) * 0.1
    weight[0] = 0
    return functional.quantize_4bit(weight.to(device, dtype), **options)


def reference(stored: torch.Tensor, state: Any) -> torch.Tensor:
    """bitsandbytes' bits; its CPU kernels multiply by other float32 values from some block sizes on, so on a CPU the
    formula in PyTorch, one operation for each rounding."""
    if stored.device.type == "cuda":
        # It transposes what is stored in one row, of whatever shape the weight is.
        return functional.dequantize_4bit(stored, state).reshape(state.shape)
    absmax = state.absmax
    if state.nested:
        outer = torch.arange(absmax.numel()) // state.state2.blocksize
        absmax = state.state2.code[absmax.int()] * state.state2.absmax[outer] + state.offset
    packed = stored.view(torch.uint8).flatten().int()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).flatten()[: math.prod(state.shape)]
    block = torch.arange(nibbles.numel()) // state.blocksize
    return (state.code[nibbles] * absmax[block]).to(state.dtype).reshape(state.shape)


def skip_if_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter truncates where it stores bfloat16")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", BLOCKS)
def test_bits(block: int, kind: str, nested: bool, dtype: torch.dtype, device: torch.device) -> None:
    skip_if_not_rounded(dtype, device)
    stored, state = quantised((24, 1030), device, dtype, blocksize=block, quant_type=kind, compress_statistics=nested)
    ours = dequantize_4bit(stored, state)
    assert ours.dtype is dtype
    assert torch.equal(ours, reference(stored, state))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bits_of_bitsandbytes_itself(kind: str, nested: bool, device: torch.device) -> None:
    stored, state = quantised((64, 256), device, torch.float32, quant_type=kind, compress_statistics=nested)
    assert torch.equal(dequantize_4bit(stored, state), functional.dequantize_4bit(stored, state))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 130)),
    block=st.sampled_from(BLOCKS[:4]),
    nested=st.booleans(),
    storage=st.sampled_from((torch.uint8, torch.bfloat16, torch.float32)),
)
def test_any_shape(
    shape: tuple[int, int], block: int, nested: bool, storage: torch.dtype, device: torch.device
) -> None:
    if math.prod(shape) % (2 * storage.itemsize):
        storage = torch.uint8  # bitsandbytes' other storages hold whole elements
    stored, state = quantised(
        shape,
        device,
        torch.float32,
        blocksize=block,
        compress_statistics=nested,
        quant_storage=storage,
        quant_type="nf4",
    )
    assert torch.equal(dequantize_4bit(stored, state), reference(stored, state))


def test_into_a_given_tensor(device: torch.device) -> None:
    stored, state = quantised((8, 64), device, torch.float16)
    around = torch.full((10, 64), 7.0, dtype=torch.float16, device=device)
    assert dequantize_4bit(stored, state, out=around[1:9]).data_ptr() == around[1:9].data_ptr()
    assert torch.equal(around[1:9], reference(stored, state))
    assert (around[[0, 9]] == 7).all()
    for wrong in (around, around[1:9].float(), around.t()[:8, :8]):
        with pytest.raises(ValueError, match="out must be contiguous"):
            dequantize_4bit(stored, state, out=wrong)


def test_a_weight_that_is_not_contiguous(device: torch.device) -> None:
    stored, state = quantised((8, 64), device, torch.float32)
    wide = torch.stack((stored, torch.zeros_like(stored)), dim=-1)
    assert torch.equal(dequantize_4bit(wide[..., 0], state), reference(stored, state))


def test_dtypes_that_cannot_be_unpacked_to(device: torch.device) -> None:
    stored, state = quantised((8, 64), device, torch.float32)
    state.dtype = torch.float64
    with pytest.raises(TypeError, match=r"not to torch\.float64"):
        dequantize_4bit(stored, state)
