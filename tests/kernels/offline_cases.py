"""Every Triton kernel with every set of launch knobs, each dtype and each constexpr branch, as launches would compile.

The host functions are called on tensors without memory, and what they would have launched is recorded: the cases cannot
differ from the real launches.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, get_args

import torch
from torch import Tensor

from slothplug.kernels.cross_entropy import Epilogue, LossSpec, RowStatistics, Upstream
from slothplug.kernels.glu import Activation, Layout, split_packed
from slothplug.kernels.rms_norm import Variant
from slothplug.kernels.rotary import Pair, Rotation
from slothplug.kernels.triton import cross_entropy, four_bit, glu, rms_norm, rotary
from tests.kernels.offline import OfflineCase, recorded_launches

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_cases() -> list[OfflineCase]:
    """Each tile and the wide kernels in bfloat16; each dtype, variant and set of gradients at one tile and wide."""
    llama, gemma = Variant(1e-5, 0.0, "before_weight"), Variant(1e-6, 1.0, "after_weight")
    wide = 3 * rms_norm._WIDE_COLUMNS
    with recorded_launches() as cases:
        for hidden in (*(tile.max_hidden for tile in rms_norm._TILES), wide):
            _rms_norm(hidden, torch.bfloat16, llama)
        for hidden in (4096, wide):
            _rms_norm(hidden, torch.bfloat16, gemma)
            _rms_norm(hidden, torch.float16, llama)
            _rms_norm(hidden, torch.float32, gemma)
            _rms_norm(hidden, torch.bfloat16, llama, weighted=False)
            _rms_norm(hidden, torch.bfloat16, llama, needs=(True, False))
            _rms_norm(hidden, torch.bfloat16, llama, needs=(False, True))
    return cases


def _rms_norm(
    hidden: int, dtype: torch.dtype, variant: Variant, weighted: bool = True, needs: tuple[bool, bool] = (True, True)
) -> None:
    """Without and with a residual; in the backward, with a residual the gradient of x is accumulated."""
    x = torch.empty(8192, hidden, dtype=dtype, device="meta")
    weight = torch.empty(hidden, dtype=dtype, device="meta") if weighted else None
    rstd = torch.empty(8192, device="meta")
    rms_norm.TritonPrimitives.forward(x, weight, variant, x, rstd)
    rms_norm.TritonPrimitives.add_forward(x, x, weight, variant, x, x, rstd)
    for accumulate in (False, True):
        grad_x, grad_weight = (x if needs[0] else None), (weight if needs[1] else None)
        rms_norm.TritonPrimitives.backward(
            x, x, weight, rstd, variant, grad_x=grad_x, grad_weight=grad_weight, accumulate=accumulate
        )


def glu_cases() -> list[OfflineCase]:
    """Every activation in both directions; then each dtype, tile, kind of strides and set of destinations once."""

    def packed(rows: int, columns: int, dtype: torch.dtype, layout: Layout) -> tuple[Tensor, Tensor]:
        return split_packed(torch.empty(rows, 2 * columns, dtype=dtype, device="meta"), layout)

    def both_directions(activation: Activation, gate: Tensor, up: Tensor) -> None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device="meta")
        glu.TritonPrimitives.forward(gate, up, activation, out)
        glu.TritonPrimitives.backward(out, gate, up, activation, grad_gate=gate, grad_up=up)

    with recorded_launches() as cases:
        for dtype in DTYPES:
            x = torch.empty(8192, 14336, dtype=dtype, device="meta")
            for activation in get_args(Activation) if dtype is torch.bfloat16 else ("silu",):
                both_directions(activation, x, x)
        both_directions("silu", *packed(8192, 14336, torch.bfloat16, "gate_up"))
        both_directions("silu", *packed(8192, 14336, torch.bfloat16, "interleaved"))
        both_directions("silu", *packed(8192, 77, torch.float32, "gate_up"))  # the narrow tile, nothing aligned
        x = torch.empty(2**31 + 8, dtype=torch.bfloat16, device="meta")  # a column count beyond int32
        both_directions("silu", x, x)
        gate, up = packed(8192, 14336, torch.bfloat16, "gate_up")
        for destinations in ({"grad_gate": gate}, {"grad_up": up}):
            glu.TritonPrimitives.backward(gate, gate, up, "silu", **destinations)
    return cases


def rotary_cases() -> list[OfflineCase]:
    """Each tile; each layout, table and direction; partial rotation, one tensor alone, and each dtype."""
    llama = Rotation(0, 128, reads_interleaved=False, writes_interleaved=False, table="halves")
    cohere = Rotation(0, 128, reads_interleaved=True, writes_interleaved=True, table="neighbours")
    deepseek = Rotation(0, 64, reads_interleaved=True, writes_interleaved=False, table="shared")
    partial = Rotation(0, 20, reads_interleaved=False, writes_interleaved=False, table="halves")
    with recorded_launches() as cases:
        for dtype in DTYPES:
            _rotary(32, 8, 128, dtype, llama)
        _rotary(14, 2, 64, torch.bfloat16, llama._replace(width=64))
        _rotary(4, None, 128, torch.bfloat16, llama)
        _rotary(32, 8, 128, torch.bfloat16, llama.transpose())
        for layout in (cohere, deepseek, deepseek._replace(table="halves")):
            for rotation in (layout, layout.transpose()):
                _rotary(32, 8, rotation.width, torch.bfloat16, rotation)
        for start in (0, 60):
            _rotary(32, 32, 80, torch.bfloat16, partial._replace(start=start))
    return cases


def _rotary(heads: int, heads_2: int | None, head_dim: int, dtype: torch.dtype, rotation: Rotation) -> None:
    def pair(heads: int) -> Pair:
        x = torch.empty(4, 2048, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)
        return x, torch.empty_like(x)

    table = torch.empty(1, 2048, rotation.width // 2 if rotation.table == "shared" else rotation.width, device="meta")
    pairs = [pair(heads), *([] if heads_2 is None else [pair(heads_2)])]
    rotary.TritonPrimitives.rotate(pairs, table, table, rotation)


# How a loss is computed: without gradients; with gradients in the forward, of a mean and of a sum, which divides by
# nothing; with gradients in the backward, which has an upstream gradient for each row.
_Way = Literal["loss", "mean", "sum", "backward"]


def cross_entropy_cases() -> list[OfflineCase]:
    """Each way in bfloat16; each tile, alignment, dtype, epilogue and option where it meets the most code."""
    plain = Epilogue(1.0, False, 1.0, torch.float32)
    capped = Epilogue(1 / 30, True, 30.0, torch.float32)
    scaled = Epilogue(0.0625, False, 1.0, torch.float32)
    with recorded_launches() as cases:
        for way in get_args(_Way):
            _cross_entropy(torch.bfloat16, 128256, plain, way)
        for vocabulary in (257, 1000, 65537):
            _cross_entropy(torch.bfloat16, vocabulary, plain)
        for dtype in (torch.float16, torch.float32):
            _cross_entropy(dtype, 128256, plain)
            _cross_entropy(dtype, 128256, capped, "backward")
        _cross_entropy(torch.bfloat16, 256000, capped)
        _cross_entropy(torch.bfloat16, 256000, scaled)
        _cross_entropy(torch.bfloat16, 128256, plain, label_smoothing=0.1)
        _cross_entropy(torch.bfloat16, 128256, capped, label_smoothing=0.1, weighted=True)
        for epilogue in (plain, capped):
            _cross_entropy(torch.bfloat16, 128256, epilogue, with_statistics=True)
        for shape, factor in (((128256, 4096), ()), ((8192, 4096), (8192,)), ((257,), ())):
            gradient, result = (torch.empty(shape, dtype=t, device="meta") for t in (torch.float32, torch.bfloat16))
            cross_entropy.TritonPrimitives.scale(gradient, torch.empty(factor, device="meta"), result)
    return cases


def _cross_entropy(
    dtype: torch.dtype,
    vocabulary: int,
    epilogue: Epilogue,
    way: _Way = "mean",
    label_smoothing: float = 0.0,
    weighted: bool = False,
    with_statistics: bool = False,
) -> None:
    logits = torch.empty(2048, -(-vocabulary // 64) * 64, dtype=dtype, device="meta")[:, :vocabulary]
    labels = torch.empty(2048, dtype=torch.int64, device="meta")
    losses = torch.empty(2048, device="meta")
    scalar = torch.empty((), device="meta")
    class_weight = torch.empty(vocabulary, device="meta") if weighted else None
    slope = epilogue.inner * epilogue.outer
    spec = LossSpec(-100, label_smoothing, epilogue, slope, class_weight, scalar if weighted else None)
    upstream = {
        "loss": None,
        "mean": Upstream(None, scalar),
        "sum": Upstream(None, None),
        "backward": Upstream(losses, None),
    }[way]
    statistics = RowStatistics.empty(2048, torch.device("meta")) if with_statistics else None
    losses_out = None if way == "backward" else losses
    cross_entropy.TritonPrimitives.cross_entropy_rows(logits, labels, losses_out, spec, upstream, statistics)


def four_bit_cases() -> list[OfflineCase]:
    """Each dtype in blocks of 64, each block size, and scales that are not quantised."""
    with recorded_launches() as cases:
        for dtype in DTYPES:
            _four_bit(dtype, 64, nested=True)
        for block in (32, 128, 256, 512, 1024, 2048, 4096):
            _four_bit(torch.bfloat16, block, nested=True)
        _four_bit(torch.bfloat16, 64, nested=False)
    return cases


def _four_bit(dtype: torch.dtype, block: int, nested: bool) -> None:
    out = torch.empty(4096, 4096, dtype=dtype, device="meta")
    floats = torch.empty(256, device="meta")
    scales = torch.empty(out.numel() // block, dtype=torch.uint8 if nested else torch.float32, device="meta")
    state = SimpleNamespace(
        shape=out.shape, dtype=dtype, blocksize=block, absmax=scales, code=floats, nested=nested,
        state2=SimpleNamespace(blocksize=256, code=floats, absmax=floats), offset=floats[0],
    )  # fmt: skip
    stored = torch.empty(out.numel() // 2, 1, dtype=torch.uint8, device="meta")
    four_bit.TritonPrimitives.dequantize(stored, state, out)


CASES: dict[str, Callable[[], list[OfflineCase]]] = {
    "rms_norm": rms_norm_cases,
    "glu": glu_cases,
    "rotary": rotary_cases,
    "cross_entropy": cross_entropy_cases,
    "four_bit": four_bit_cases,
}
"""By the module of ``slothplug.kernels.triton`` whose kernels they are."""
