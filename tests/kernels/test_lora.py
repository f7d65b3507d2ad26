"""LoRA linears that share an input: outputs and every gradient against float64, and the rules of a fused node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from slothplug.exactness import assert_as_exact
from slothplug.kernels.lora import Dtypes, Factors, Operand, lora_linear

K, ROWS = 24, 12
OUT = (40, 16, 8)
FLOAT32_FLOOR = 1e-6
SCALINGS = (2.0, 0.75, 1.25)  # exact in float32, so that neither side has their rounding as a bias

Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """Dtypes of x, of the base layers and of the adapters; whether autocast is on, and in which dtype."""

    x: torch.dtype
    base: torch.dtype
    adapter: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def dtypes(self) -> Dtypes:
        """PEFT's."""
        return Dtypes(self.x, self.adapter, self.x) if self.autocast is None else Dtypes(*[self.autocast] * 3)


FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)
CASES = {
    "float32": Case(torch.float32, torch.float32, torch.float32),
    "bfloat16": Case(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "float16": Case(torch.float16, torch.float16, torch.float16),
    "bfloat16, float32 adapters": Case(torch.bfloat16, torch.bfloat16, torch.float32),
    "float16, float32 adapters": Case(torch.float16, torch.float16, torch.float32),
    "autocast over bfloat16, float32 adapters": Case(torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16),
    "autocast over float32": Case(torch.float32, torch.float32, torch.float32, torch.bfloat16),
    "autocast over float32 with bfloat16 x": Case(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16),
}


def operands(case: Case, ranks: Sequence[int], *, bias: bool, b_bias: bool, device: torch.device) -> list[Operand]:
    def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale / shape[-1] ** 0.5).to(dtype).requires_grad_()

    return [
        Operand(
            weight=draw(OUT[i], K, dtype=case.base),
            bias=draw(OUT[i], dtype=case.base) if bias else None,
            a=draw(rank, K, dtype=case.adapter),
            b=draw(OUT[i], rank, dtype=case.adapter, scale=0.3),
            scaling=SCALINGS[i],
            b_bias=draw(OUT[i], dtype=case.adapter) if b_bias else None,
        )
        for i, rank in enumerate(ranks)
    ]


def rows(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    scales = torch.tensor([1e-3, 1.0, 1e3 if dtype is not torch.float16 else 30.0], device=device).repeat(ROWS // 3)
    return (torch.randn(2, ROWS // 2, K, device=device) * scales.view(2, -1, 1)).to(dtype).requires_grad_()


def peft(x: torch.Tensor, o: Operand) -> torch.Tensor:
    """What ``peft.tuners.lora.Linear.forward`` runs for one active adapter without dropout."""
    result = F.linear(x, o.weight, o.bias)
    dtype = result.dtype
    result = result + F.linear(F.linear(x.to(o.a.dtype), o.a), o.b, o.b_bias) * o.scaling
    return result.to(dtype)


def exact(x: torch.Tensor, o: Operand) -> torch.Tensor:
    low = (x @ o.a.T) @ o.b.T
    low = low if o.b_bias is None else low + o.b_bias
    y = x @ o.weight.T + o.scaling * low
    return y if o.bias is None else y + o.bias


def named(x: torch.Tensor, ops: Sequence[Operand]) -> Tensors:
    leaves = {"x": x}
    for i, o in enumerate(ops):
        for field, value in o._asdict().items():
            if isinstance(value, torch.Tensor):
                leaves[f"{field}{i}"] = value
    return leaves


def outcome(ys: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor], leaves: Tensors) -> Tensors:
    grads = torch.autograd.grad(
        ys, list(leaves.values()), [g.to(y.dtype) for g, y in zip(grad_outputs, ys, strict=True)]
    )
    result = {f"y{i}": y for i, y in enumerate(ys)}
    return result | {f"grad {name}": as_rows(name, grad) for name, grad in zip(leaves, grads, strict=True)}


def as_rows(name: str, grad: torch.Tensor) -> torch.Tensor:
    """The rows in which a gradient is measured: b's columns [O], as its rows have only as many elements as the rank.

    The rms of one or two elements may be near 0, and the ratio of two largest errors relative to it is noise.
    """
    return grad.t() if name.startswith("b") and grad.ndim == 2 else grad


def in_float64(x: torch.Tensor, ops: Sequence[Operand]) -> tuple[torch.Tensor, list[Operand]]:
    def double(value: Any) -> Any:
        return value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) else value

    return double(x), [Operand(*map(double, o)) for o in ops]


def draw(
    case: Case, ranks: Sequence[int], seed: int, device: torch.device, **biases: bool
) -> tuple[Tensors, Tensors, Tensors]:
    torch.manual_seed(seed)
    ops, x = operands(case, ranks, device=device, **biases), rows(case.x, device)
    x64, ops64 = in_float64(x, ops)
    ours = lora_linear(x, ops, case.dtypes)
    with torch.autocast(device.type, case.autocast) if case.autocast else nullcontext():
        stock = [peft(x, o) for o in ops]
    # Gradients that every output dtype holds exactly, so that the oracle has the same ones.
    gs = [torch.randn(y.shape, device=device).bfloat16().to(y.dtype) for y in stock]
    got, expected = outcome(ours, gs, named(x, ops)), outcome(stock, gs, named(x, ops))
    assert {name: value.dtype for name, value in got.items()} == {name: value.dtype for name, value in expected.items()}
    reference = outcome([exact(x64, o) for o in ops64], gs, named(x64, ops64))
    return as_computed(got, case), as_computed(expected, case), reference


def as_computed(tensors: Tensors, case: Case) -> Tensors:
    """Float32 gradients of products made in a lower dtype carry errors of that dtype, and are measured in its units."""
    return {name: value if case.autocast is None else value.to(case.autocast) for name, value in tensors.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ranks", [(1,), (4, 64), (5, 16, 8)], ids=str)
def test_outputs_and_gradients_are_as_exact_as_pefts(case: Case, ranks: Sequence[int], device: torch.device) -> None:
    assert_as_exact(lambda seed: draw(case, ranks, seed, device, bias=False, b_bias=False))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("bias", "b_bias"), [(True, False), (True, True)])
def test_biases_are_added_once_and_trained(case: Case, bias: bool, b_bias: bool, device: torch.device) -> None:
    # A rank of 2 gives dB rows of two elements, which may both be almost 0: a pool's largest relative error would then
    # depend on its draws more than on the kernel.
    assert_as_exact(lambda seed: draw(case, (8, 4), seed, device, bias=bias, b_bias=b_bias))


def test_adapters_can_read_another_input(device: torch.device) -> None:
    case = CASES["bfloat16, float32 adapters"]

    def with_dropout(seed: int) -> tuple[Tensors, Tensors, Tensors]:
        torch.manual_seed(seed)
        (o,), x = operands(case, (4,), bias=True, b_bias=False, device=device), rows(case.x, device)
        dropped = (torch.randn_like(x, dtype=torch.float32) + x.detach().float()).requires_grad_()
        x64, (o64,) = in_float64(x, [o])
        dropped64 = dropped.detach().double().requires_grad_()
        (ours,) = lora_linear(x, [o], case.dtypes, adapter_input=dropped)
        stock = (F.linear(x, o.weight, o.bias) + F.linear(F.linear(dropped, o.a), o.b) * o.scaling).to(x.dtype)
        oracle = x64 @ o64.weight.T + o64.bias + o64.scaling * (dropped64 @ o64.a.T @ o64.b.T)
        g = [torch.randn_like(stock)]
        return (
            outcome([ours], g, {**named(x, [o]), "x'": dropped}),
            outcome([stock], g, {**named(x, [o]), "x'": dropped}),
            outcome([oracle], g, {**named(x64, [o64]), "x'": dropped64}),
        )

    assert_as_exact(with_dropout)


def test_adapters_can_multiply_in_another_dtype_than_theirs(device: torch.device) -> None:
    case = CASES["bfloat16, float32 adapters"]
    torch.manual_seed(0)
    (o,), x = operands(case, (4,), bias=False, b_bias=False, device=device), rows(case.x, device)
    cast = o._replace(a=o.a.detach().to(x.dtype), b=o.b.detach().to(x.dtype))
    dtypes = Dtypes(x.dtype, x.dtype, x.dtype)
    (got,) = lora_linear(x, [o], dtypes)
    assert torch.equal(got, lora_linear(x, [cast], dtypes)[0])
    grad_a, grad_b = torch.autograd.grad(got.sum(), [o.a, o.b])
    assert grad_a.dtype is grad_b.dtype is torch.float32


def test_factors_that_the_caller_has_cast(device: torch.device) -> None:
    case = CASES["autocast over float32"]
    torch.manual_seed(0)
    ops, x = operands(case, (4, 3), bias=True, b_bias=False, device=device), rows(case.x, device)
    factors = Factors(torch.cat([o.a for o in ops]).detach().bfloat16(), [o.b.detach().bfloat16() for o in ops])
    leaves = list(named(x, ops).values())
    outcomes = []
    for given in (factors, None):
        ys = lora_linear(x, ops, case.dtypes, factors=given)
        outcomes.append((*ys, *torch.autograd.grad([y.sum() for y in ys], leaves)))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_value_that_is_not_finite_stays_in_its_operand(case: Case, device: torch.device) -> None:
    """S of all operands is one tensor: columns of odd rank are followed by another operand's."""
    for ranks in ((5, 3, 4), (1, 1, 1), (7, 2, 9)):
        torch.manual_seed(0)
        ops, x = operands(case, ranks, bias=False, b_bias=False, device=device), rows(case.x, device)
        for bad in range(3):
            planted = list(ops)
            planted[bad] = ops[bad]._replace(a=torch.full_like(ops[bad].a, torch.nan).requires_grad_())
            others = [i for i in range(3) if i != bad]
            outcomes = []
            for drawn in (planted, ops):
                ys = lora_linear(x, drawn, case.dtypes)
                factors = [factor for i in others for factor in (drawn[i].a, drawn[i].b)]
                outcomes.append((*(ys[i] for i in others), *torch.autograd.grad([y.sum() for y in ys], factors)))
            assert all(map(torch.equal, *outcomes)), (ranks, bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_lies_between_the_rows_of_an_input_is_not_read(dtype: torch.dtype, device: torch.device) -> None:
    same = Dtypes(dtype, dtype, dtype)
    torch.manual_seed(0)
    (o,) = operands(Case(dtype, dtype, dtype), (5,), bias=False, b_bias=False, device=device)
    o = o._replace(weight=o.weight[:, :-1].detach(), a=o.a[:, :-1].detach().requires_grad_())
    wide = rows(dtype, device).detach()
    wide[..., -1] = torch.nan
    outcomes = []
    for x in (wide[..., :-1], wide[..., :-1].clone()):
        x.requires_grad_()
        (y,) = lora_linear(x, [o], same)
        outcomes.append((y, *torch.autograd.grad(y.sum(), [x, o.a, o.b])))
    assert all(map(torch.equal, *outcomes))


def test_gradients_nobody_asked_for_are_not_computed_or_kept(device: torch.device) -> None:
    (o,) = operands(CASES["float32"], (4,), bias=True, b_bias=False, device=device)
    frozen = o._replace(weight=o.weight.detach(), bias=o.bias.detach())
    x = torch.randn(5, K, device=device)
    (y,) = lora_linear(x, [frozen], FLOAT32)
    kept = {id(tensor) for tensor in y.grad_fn.saved_tensors if tensor is not None}
    assert id(frozen.weight) not in kept, "the base weight is only read by the gradient of x"
    y.sum().backward()
    assert o.a.grad is not None
    assert o.b.grad is not None

    x.requires_grad_()
    adapters_frozen = frozen._replace(a=o.a.detach(), b=o.b.detach())
    (y,) = lora_linear(x, [adapters_frozen], FLOAT32)
    sizes = [tensor.shape for tensor in y.grad_fn.saved_tensors if tensor is not None]
    assert (5, K) not in sizes, "no gradient reads x"
    y.sum().backward()
    delta = adapters_frozen.weight + o.scaling * adapters_frozen.b @ adapters_frozen.a
    torch.testing.assert_close(x.grad, delta.sum(0).expand_as(x))


def test_unused_outputs_have_no_gradients(device: torch.device) -> None:
    ops = operands(CASES["float32"], (4, 2, 3), bias=True, b_bias=False, device=device)
    x = torch.randn(5, K, device=device, requires_grad=True)
    lora_linear(x, ops, FLOAT32)[1].sum().backward()
    got = x.grad
    for i in (0, 2):
        assert all(value.grad is None for value in ops[i] if isinstance(value, torch.Tensor))
    grads = [value.grad for value in ops[1] if isinstance(value, torch.Tensor)]
    x.grad = None
    for value in ops[1]:
        if isinstance(value, torch.Tensor):
            value.grad = None
    peft(x, ops[1]).sum().backward()
    torch.testing.assert_close(got, x.grad)
    for mine, theirs in zip(grads, [v.grad for v in ops[1] if isinstance(v, torch.Tensor)], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_backward_is_repeatable_and_leaves_its_inputs_alone(device: torch.device) -> None:
    ops, x = operands(CASES["bfloat16"], (4, 2), bias=True, b_bias=True, device=device), rows(torch.bfloat16, device)
    leaves = named(x, ops)
    before = {name: value.detach().clone() for name, value in leaves.items()}
    ys = lora_linear(x, ops, CASES["bfloat16"].dtypes)
    gs = [torch.randn_like(y) for y in ys]
    kept = [g.clone() for g in gs]
    first = torch.autograd.grad(ys, list(leaves.values()), gs, retain_graph=True)
    second = torch.autograd.grad(ys, list(leaves.values()), gs)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(gs, kept, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in leaves.items())


def test_autocast_around_backward_changes_nothing(device: torch.device) -> None:
    ops, x = operands(CASES["float32"], (4, 2), bias=True, b_bias=True, device=device), rows(torch.float32, device)
    leaves = list(named(x, ops).values())
    outside = torch.autograd.grad([y.sum() for y in lora_linear(x, ops, FLOAT32)], leaves)
    ys = [y.sum() for y in lora_linear(x, ops, FLOAT32)]
    with torch.autocast(device.type, torch.bfloat16):
        inside = torch.autograd.grad(ys, leaves)
    assert all(torch.equal(one, two) for one, two in zip(outside, inside, strict=True))


@pytest.mark.parametrize("shape", [(0, K), (K,), (2, 0, K), (1, 1, 1, K)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...], device: torch.device) -> None:
    ops = operands(CASES["float32"], (4, 2), bias=True, b_bias=False, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    leaves = list(named(x, ops).values())
    ours, stock = lora_linear(x, ops, FLOAT32), [peft(x, o) for o in ops]
    for one, two in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, two)
    grads = [torch.autograd.grad([y.sum() for y in ys], leaves) for ys in (ours, stock)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


def test_outputs_may_be_written_to_as_those_of_a_linear_layer(device: torch.device) -> None:
    case = CASES["float32"]
    parts = operands(case, (4, 3), bias=False, b_bias=False, device=device)
    x = torch.randn(2, 3, K, device=device, requires_grad=True)
    written = [output.mul_(2.0) for output in lora_linear(x, parts, FLOAT32)]
    fresh = [output * 2.0 for output in lora_linear(x, parts, FLOAT32)]
    projections = [torch.randn_like(output) for output in fresh]
    got = torch.autograd.grad(written, [x, parts[0].a, parts[1].b], projections)
    expected = torch.autograd.grad(fresh, [x, parts[0].a, parts[1].b], projections)
    assert all(map(torch.equal, got, expected))


def test_gradients_in_one_storage_do_not_touch_each_other(device: torch.device) -> None:
    """Accumulation, clipping, zeroing and an optimizer's step write into ``grad``."""
    parts = operands(CASES["float32"], (4, 3, 2), bias=False, b_bias=False, device=device)
    factors = [part.a for part in parts]
    x = torch.randn(5, K, device=device)

    def gradients(scale: float) -> list[torch.Tensor]:
        total = sum((y * y).sum() for y in lora_linear(x, parts, FLOAT32)) * scale
        return [gradient.clone() for gradient in torch.autograd.grad(total, factors)]

    def backward(scale: float) -> None:
        (sum((y * y).sum() for y in lora_linear(x, parts, FLOAT32)) * scale).backward()

    expected = gradients(1.0)
    backward(1.0)
    assert len({factor.grad.untyped_storage().data_ptr() for factor in factors}) == 1
    backward(2.0)
    for factor, gradient in zip(factors, expected, strict=True):
        torch.testing.assert_close(factor.grad, gradient * 3)
    norm = torch.nn.utils.clip_grad_norm_(factors, 1.0)
    whole = torch.cat([gradient.flatten() * 3 for gradient in expected])
    torch.testing.assert_close(norm, whole.norm())
    torch.testing.assert_close(torch.cat([factor.grad.flatten() for factor in factors]), whole / (norm + 1e-6))
    factors[1].grad.zero_()
    assert factors[0].grad.count_nonzero() == factors[0].numel()
    assert factors[2].grad.count_nonzero() == factors[2].numel()
    optimizer = torch.optim.SGD(factors, lr=0.0, weight_decay=0.1, foreach=False)
    optimizer.zero_grad(set_to_none=False)
    backward(1.0)
    for factor, gradient in zip(factors, expected, strict=True):
        torch.testing.assert_close(factor.grad, gradient)


def test_any_strides_of_input_and_gradient(device: torch.device) -> None:
    ops = operands(CASES["float32"], (4, 2), bias=False, b_bias=False, device=device)
    x = torch.randn(K, 6, device=device).t().requires_grad_()
    leaves = list(named(x, ops).values())
    results = []
    for ys in (lora_linear(x, ops, FLOAT32), [peft(x, o) for o in ops]):
        gs = [torch.ones(1, device=device).expand_as(ys[0]), torch.arange(96.0, device=device).view(16, 6).t()]
        results.append((*ys, *torch.autograd.grad(ys, leaves, gs)))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


def test_what_it_does_not_take_is_refused(device: torch.device) -> None:
    case = CASES["bfloat16, float32 adapters"]
    ops = operands(case, (4, 2), bias=False, b_bias=False, device=device)
    with pytest.raises(ValueError, match="at least one"):
        lora_linear(rows(torch.bfloat16, device), [], case.dtypes)
    with pytest.raises(TypeError, match="float64"):
        lora_linear(torch.randn(2, K, dtype=torch.float64, device=device), ops, case.dtypes)
    unequal = [ops[0], ops[1]._replace(a=ops[1].a.bfloat16(), b=ops[1].b.bfloat16())]
    with pytest.raises(TypeError, match="unequal"):
        lora_linear(rows(torch.bfloat16, device), unequal, case.dtypes)
