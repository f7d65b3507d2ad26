"""LoRA on base weights that are packed: as exact as PEFT's way with bitsandbytes, and nothing unpacked is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from slothplug.exactness import assert_as_exact
from slothplug.kernels.lora import DENSE, Dtypes, Operand, Packed, lora_linear

K, ROWS = 24, 12
OUT, SCALINGS = (40, 16, 8), (2.0, 0.75, 1.25)

Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """Dtypes of x, of the base layer's products and of the adapters; autocast's where that is on."""

    x: torch.dtype
    compute: torch.dtype
    adapter: torch.dtype
    autocast: torch.dtype | None = None

    def dtypes(self, device: torch.device) -> Dtypes:
        """PEFT's, whose output is autocast's only if autocast is on for CUDA."""
        if self.autocast is None:
            return Dtypes(self.compute, self.adapter, self.x)
        output = torch.promote_types(self.x, self.autocast) if device.type == "cuda" else self.x
        return Dtypes(self.autocast, self.autocast, output)

    @property
    def coarsest(self) -> torch.dtype:
        dtypes = [self.x, self.compute, self.adapter] if self.autocast is None else [self.compute, self.autocast]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "float32": Case(SINGLE, SINGLE, SINGLE),
    "bfloat16": Case(BRAIN, BRAIN, BRAIN),
    "bfloat16, float32 adapters": Case(BRAIN, BRAIN, SINGLE),
    "float16, float32 adapters": Case(HALF, HALF, SINGLE),
    "float32 x, bfloat16 products, float32 adapters": Case(SINGLE, BRAIN, SINGLE),
    "bfloat16 x, float32 products": Case(BRAIN, SINGLE, SINGLE),
    "autocast, float32 adapters": Case(BRAIN, BRAIN, SINGLE, BRAIN),
    "autocast, float32 x": Case(SINGLE, BRAIN, SINGLE, BRAIN),
    "autocast, float32 products": Case(BRAIN, SINGLE, SINGLE, BRAIN),
}


def unpack(stored: torch.Tensor, scale: float) -> torch.Tensor:
    return stored * scale


def operands(case: Case, ranks: Sequence[int], bias: bool, device: torch.device) -> list[Operand]:
    def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype).requires_grad_()

    return [
        Operand(
            # Integers times a power of two: every dtype holds the weight exactly.
            torch.randint(-8, 9, (OUT[i], K), device=device, dtype=torch.int8),
            draw(OUT[i], dtype=case.compute) if bias else None,
            draw(rank, K, dtype=case.adapter),
            draw(OUT[i], rank, dtype=case.adapter),
            SCALINGS[i],
            base=Packed(2.0**-5, unpack),
        )
        for i, rank in enumerate(ranks)
    ]


def rows(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    scales = torch.tensor([1e-3, 1.0, 1e3 if dtype is not HALF else 30.0], device=device).repeat(ROWS // 3)
    return (torch.randn(2, ROWS // 2, K, device=device) * scales.view(2, -1, 1)).to(dtype).requires_grad_()


def peft(x: torch.Tensor, o: Operand, compute: torch.dtype) -> torch.Tensor:
    """``peft.tuners.lora.bnb.Linear4bit.forward`` with bitsandbytes' ``Linear4bit.forward`` in it."""
    weight = o.base.dequantize(o.weight, o.base.state).to(compute)
    result = F.linear(x.to(compute), weight, o.bias).to(x.dtype)
    if torch.is_autocast_enabled():  # for CUDA, on every device
        return result + F.linear(F.linear(x, o.a), o.b) * o.scaling
    return result + (F.linear(F.linear(x.to(o.a.dtype), o.a), o.b) * o.scaling).to(result.dtype)


def outcome(ys: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor], leaves: Tensors) -> Tensors:
    grads = torch.autograd.grad(ys, list(leaves.values()), grad_outputs)
    return {f"y{i}": y for i, y in enumerate(ys)} | {f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}


def named(x: torch.Tensor, ops: Sequence[Operand]) -> Tensors:
    fields = {f"{field}{i}": value for i, o in enumerate(ops) for field, value in o._asdict().items()}
    return {"x": x} | {
        n: value for n, value in fields.items() if isinstance(value, torch.Tensor) and value.requires_grad
    }


def draw(case: Case, ranks: Sequence[int], bias: bool, seed: int, device: torch.device) -> Any:
    torch.manual_seed(seed)
    ops, x = operands(case, ranks, bias, device), rows(case.x, device)
    ours = lora_linear(x, ops, case.dtypes(device))
    with torch.autocast(device.type, case.autocast) if case.autocast else nullcontext():
        stock = [peft(x, o, case.compute) for o in ops]
    grads = [torch.randn(y.shape, device=device).bfloat16() for y in stock]  # exact in every dtype but float16
    grads = [g.half().to(y.dtype) for g, y in zip(grads, stock, strict=True)]
    got, expected = outcome(ours, grads, named(x, ops)), outcome(stock, grads, named(x, ops))
    assert {name: value.dtype for name, value in got.items()} == {name: value.dtype for name, value in expected.items()}

    def double(value: Any) -> Any:
        return value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) else value

    x64, ops64 = double(x), [o._replace(bias=double(o.bias), a=double(o.a), b=double(o.b)) for o in ops]
    exact = []
    for o in ops64:
        y = x64 @ (o.weight.double() * o.base.state).T + o.scaling * (x64 @ o.a.T @ o.b.T)
        exact.append(y if o.bias is None else y + o.bias)
    reference = outcome(exact, [g.double() for g in grads], named(x64, ops64))

    def in_units(tensors: Tensors) -> Tensors:
        return {n: t if t.dtype is not SINGLE else t.to(case.coarsest) for n, t in tensors.items()}

    return in_units(got), in_units(expected), reference


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("ranks", "bias"), [((4,), False), ((5, 16, 8), True)], ids=str)
def test_outputs_and_gradients_are_as_exact_as_pefts(
    case: Case, ranks: Sequence[int], bias: bool, device: torch.device
) -> None:
    assert_as_exact(lambda seed: draw(case, ranks, bias, seed, device))


def test_one_weight_at_a_time_is_unpacked_and_none_is_kept(device: torch.device) -> None:
    alive: list[StorageWeakRef] = []

    def noted(stored: torch.Tensor, scale: float) -> torch.Tensor:
        assert all(earlier.expired() for earlier in alive)
        weight = unpack(stored, scale)
        alive.append(StorageWeakRef(weight.untyped_storage()))
        return weight

    case = CASES["bfloat16"]
    ops = [o._replace(base=Packed(o.base.state, noted)) for o in operands(case, (4, 2, 3), False, device)]
    ys = lora_linear(rows(case.x, device), ops, case.dtypes(device))
    assert len(alive) == 3
    assert alive[-1].expired()
    torch.autograd.backward([y.sum() for y in ys])
    assert len(alive) == 6
    assert alive[-1].expired()


def test_where_x_needs_no_gradient_the_backward_unpacks_nothing(device: torch.device) -> None:
    calls = []

    def noted(stored: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(stored)
        return unpack(stored, scale)

    case = CASES["float32"]
    (o,) = operands(case, (4,), False, device)
    x = rows(SINGLE, device).detach()
    (y,) = lora_linear(x, [o._replace(base=Packed(o.base.state, noted))], case.dtypes(device))
    y.sum().backward()
    assert len(calls) == 1


def test_packed_and_dense_weights_can_share_a_node(device: torch.device) -> None:
    case = CASES["bfloat16"]
    one, two = operands(case, (4, 4), False, device)
    dense = one._replace(weight=unpack(one.weight, one.base.state).to(case.x), base=DENSE)
    x, leaves = rows(case.x, device), [one.a, one.b, two.a, two.b]
    outcomes = []
    for ops in ((one, two), (dense, two)):
        ys = lora_linear(x, ops, case.dtypes(device))
        outcomes.append((*ys, *torch.autograd.grad([y.sum() for y in ys], [x, *leaves])))
    assert all(map(torch.equal, *outcomes))
