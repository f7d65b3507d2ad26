"""The bare operations at Llama-3-8B's shape: HF eager, Liger and slothplug beside each other, and the byte floor.

    python -m slothplug.bench.kernels --output docs/benchmarks/kernels

``alone`` is a call that the GPU waits for, after the L2 cache was flushed: where it is longer than ``queued``, the host
is its pace. ``queued`` is one of many calls that wait for the GPU (a CUDA graph of them). The byte floor is what any
implementation must move over the copy rate measured in the same run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from slothplug.bench.environment import markdown, show, versions
from slothplug.kernels.four_bit import dequantize_4bit
from slothplug.kernels.glu import glu
from slothplug.kernels.rms_norm import rms_norm
from slothplug.kernels.rotary import rotary

TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8192, 4096, 14336, 32, 8, 128


@dataclass(frozen=True)
class Case:
    """One operation: what is run, on which inputs, and how many bytes forward and backward must move."""

    name: str
    inputs: Callable[[], list[torch.Tensor]]
    providers: dict[str, Callable[..., Any]]
    forward_bytes: int
    backward_bytes: int | None
    """None where the operation has no gradient."""


def cases() -> Iterator[Case]:
    yield _rms_norm_case("rms_norm 8192 x 4096", TOKENS, HIDDEN)
    yield _rms_norm_case("rms_norm (QK) 262144 x 128", TOKENS * HEADS, HEAD_DIM)
    yield _rotary_case()
    yield _glu_case()
    if importlib.util.find_spec("bitsandbytes"):
        for nested in (True, False):
            yield _dequantize_case(nested)


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _rms_norm_case(name: str, rows: int, width: int) -> Case:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    module = LlamaRMSNorm(width, 1e-5).to("cuda", torch.bfloat16)
    module.weight.requires_grad_(False)
    stream = 2 * rows * width
    providers: dict[str, Callable[..., Any]] = {
        "eager": module,
        "torch.nn": lambda x: torch.nn.functional.rms_norm(x, (width,), weight, 1e-5),
        "slothplug": lambda x: rms_norm(x, weight, 1e-5, backend="triton"),
    }
    if liger := _liger():
        norm = liger.LigerRMSNorm(width, 1e-5).to("cuda", torch.bfloat16)
        norm.weight.requires_grad_(False)
        providers["liger"] = norm
    return Case(name + ", frozen weight", lambda: [_tensor(rows, width)], providers, 2 * stream, 3 * stream)


def _rotary_case() -> Case:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    length, batch = 2048, TOKENS // 2048
    angles = torch.outer(torch.arange(length), 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    table = torch.cat((angles, angles), -1)[None].cuda()
    cos, sin = table.cos().bfloat16(), table.sin().bfloat16()

    def inputs() -> list[torch.Tensor]:
        q = _tensor(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = _tensor(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        return [q.detach().requires_grad_(), k.detach().requires_grad_()]

    providers: dict[str, Callable[..., Any]] = {
        "eager": lambda q, k: apply_rotary_pos_emb(q, k, cos, sin),
        "slothplug": lambda q, k: rotary(q, k, cos, sin, backend="triton"),
    }
    if liger := _liger():
        # Liger overwrites its inputs, so it gets copies, as a graph that needs q and k again would.
        providers["liger (clones q, k)"] = lambda q, k: liger.liger_rotary_pos_emb(q.clone(), k.clone(), cos, sin)
    stream = 2 * TOKENS * (HEADS + KV_HEADS) * HEAD_DIM
    return Case("rotary 4 x 2048, 32/8 heads x 128", inputs, providers, 2 * stream, 2 * stream)


def _glu_case() -> Case:
    silu = torch.nn.functional.silu
    providers: dict[str, Callable[..., Any]] = {
        "eager": lambda gate, up: silu(gate) * up,
        "slothplug": lambda gate, up: glu(gate, up, activation="silu", backend="triton"),
    }
    if _liger():
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # Liger's backward overwrites gate and up, so it gets copies: its own MLP owns those buffers.
        providers["liger (in place)"] = LigerSiLUMulFunction.apply
    stream = 2 * TOKENS * INTERMEDIATE
    return Case(
        "glu (SiLU) 8192 x 14336",
        lambda: [_tensor(TOKENS, INTERMEDIATE), _tensor(TOKENS, INTERMEDIATE)],
        providers,
        3 * stream,
        5 * stream,
    )


def _dequantize_case(nested: bool) -> Case:
    from bitsandbytes import functional

    weight = torch.randn(INTERMEDIATE, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stored, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    providers: dict[str, Callable[..., Any]] = {
        "bitsandbytes": lambda: functional.dequantize_4bit(stored, state),
        "slothplug": lambda: dequantize_4bit(stored, state),
    }
    scales = weight.numel() // 64 * (1 if nested else 4)
    name = f"NF4 14336 x 4096 to bfloat16, {'double quant' if nested else 'plain absmax'}"
    return Case(name, list, providers, weight.numel() * 5 // 2 + scales, None)


def _liger() -> Any:
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        return None
    return liger


def copy_rate() -> float:
    """Bytes a second, read and written, of a large device-to-device copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _milliseconds(lambda: target.copy_(source)) * 1e3


def _milliseconds(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=25, rep=150, return_mode="median")


def _queued_milliseconds(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(run, rep=50, return_mode="median")


def measure(case: Case, rate: float) -> Iterator[dict[str, Any]]:
    """Forward, and forward + backward, of each provider."""
    for name, function in case.providers.items():
        inputs = case.inputs()

        def forward(function: Any = function, inputs: Any = inputs) -> Any:
            with torch.no_grad():
                return function(*inputs)

        runs: list[tuple[str, Callable[[], Any], int]] = [("forward", forward, case.forward_bytes)]
        if case.backward_bytes is not None:
            runs.append(("forward + backward", _both(function, inputs), case.forward_bytes + case.backward_bytes))
        for mode, run, size in runs:
            figures = {"ms": _milliseconds(run), "queued_ms": _queued_milliseconds(run), "floor_ms": size / rate * 1e3}
            yield {"case": case.name, "mode": mode, "provider": name, **figures}


def _both(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """Forward and backward."""

    def outputs() -> tuple[torch.Tensor, ...]:
        result = function(*inputs)
        return result if isinstance(result, tuple) else (result,)

    grads = [torch.randn_like(output) for output in outputs()]
    return lambda: torch.autograd.grad(outputs(), inputs, grads)


def main(output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None) -> None:
    """Times the operations and prints a table."""
    torch.manual_seed(0)
    rate = copy_rate()
    rows = [row for case in cases() for row in measure(case, rate)]
    table = markdown(
        ("operation", "mode", "provider", "alone, ms", "queued, ms", "queued, of the byte floor"),
        (
            (
                *(r["case"], r["mode"], r["provider"], f"{r['ms']:.3f}", f"{r['queued_ms']:.3f}"),
                f"{r['queued_ms'] / r['floor_ms']:.2f}x",
            )
            for r in rows
        ),
    )
    text = f"{versions()}; copy {rate / 1e12:.2f} TB/s\n\n{table}\n"
    show(output, "kernels", "Bare operations", rows, text)


if __name__ == "__main__":
    typer.run(main)
