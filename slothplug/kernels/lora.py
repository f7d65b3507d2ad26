"""LoRA linears that share an input: y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T, in one autograd node.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. With A = [A_1; ..; A_n] stacked,

    S    = x A^T                                   one product for all n
    y_i  = s_i S_i B_i^T + b_i + s_i c_i           c_i is the bias of the adapter's second layer, where it has one
    y_i += x W_i^T                                 accumulated on it in float32 by the same product

so that no pass over y is spent on scaling or adding. Backward, with g_i the gradient of y_i:

    dS_i = s_i g_i B_i        dA = dS^T x          one product for all n
    dB_i = s_i g_i^T S_i      dx = dS A + sum_i g_i W_i          accumulated into one buffer
    dW_i = g_i^T x            db_i = sum of g_i's rows,  dc_i = s_i db_i

The scale is a factor of the products (``alpha``), never of a tensor. Where the adapters are given another input x' than
x (x after dropout), S, dA and dS A belong to x' and the rest to x.

Dtypes are PEFT's. Under autocast, or where all is of one dtype, every product is made in that dtype. Outside autocast,
adapters of another dtype than x multiply in their own, and x W^T is rounded to its own dtype before the sum, as PEFT
does. A's and B's gradients have A's and B's dtype.

A base weight may be stored otherwise than it is multiplied in (4 bits an element, as in Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs", 2023). It is frozen and has a dtype of its own for its products outside
autocast; y returns to x's dtype after the sum. Each pass unpacks one weight at a time and keeps none:
O_i K (e + 1/2) bytes more to move, once forward and once for dx.

Cost for x [N, K], W_i [O_i, K], rank r_i, e bytes an element: forward 2 N K O_i + 2 N r_i (K + O_i) flops, of which the
first term is the base layer's own; it reads x twice in all and writes y_i twice. Backward is twice that, less the dW_i
of frozen weights. Kept for backward: x once, S [N, sum r_i], and references to (or casts of) W, A and B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from slothplug.kernels.once_differentiable import once_differentiable

Precision = Literal["peft", "compute"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """A frozen base weight that is stored otherwise than it is multiplied in.

    Attributes:
        stored: any tensor; what is kept for the backward.
        state: what else ``unpack`` needs.
        unpack: makes a new [O, K] tensor of ``stored`` and ``state``.
        dtype: x and the unpacked weight are multiplied in it outside autocast; under autocast, in autocast's.
    """

    stored: torch.Tensor
    state: Any
    unpack: Callable[[torch.Tensor, Any], torch.Tensor]
    dtype: torch.dtype


class Operand(NamedTuple):
    """One LoRA linear. The base layer and both parts of the adapter may be trainable or frozen.

    The gradients of several operands' a's are disjoint parts of one tensor: in-place operations on one do not reach the
    others, and the memory is freed when the last of them is.

    Attributes:
        weight: [O, K], the base layer's, or one that is packed.
        bias: [O] or None, the base layer's.
        a: [r, K].
        b: [O, r], of a's dtype.
        scaling: factor of the adapter's output.
        b_bias: [O] or None, added to S B^T before the scaling.
    """

    weight: torch.Tensor | Packed
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    b_bias: torch.Tensor | None = None


class _Plan(NamedTuple):
    """What is no tensor, or owed no gradient. ``packed`` has a place for each operand, or is empty."""

    scalings: tuple[float, ...]
    base_dtype: torch.dtype
    adapter_dtype: torch.dtype
    output_dtype: torch.dtype
    packed: tuple[Packed, ...]
    lowered: Sequence[tuple[torch.Tensor, torch.Tensor]] | None


def lora_linear(
    x: torch.Tensor,
    operands: Sequence[Operand],
    *,
    adapter_input: torch.Tensor | None = None,
    lowered: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
    precision: Precision = "peft",
) -> tuple[torch.Tensor, ...]:
    """Applies LoRA linears that share an input.

    Args:
        x: [..., K], float32, float16 or bfloat16, any strides.
        operands: one or more, of any ranks and output sizes.
        adapter_input: x' [..., K], what the adapters read instead of x: x after dropout. None where they read x.
        lowered: A and B of each operand, detached and in the dtype of the adapters' products, where the caller has them
            so already; by default they are cast here.
        precision: "peft" keeps PEFT's dtypes; "compute" casts the adapters to x's dtype outside autocast.

    Returns:
        One [..., O_i] for each operand, of autocast's dtype where that is on and of x's otherwise; with packed weights,
        of x's dtype, and under CUDA's autocast of the wider of the two. Differentiable once in every tensor. The
        gradients of the A's may share one storage, without overlap.

    Raises:
        TypeError: a dtype other than the three, adapters of unequal dtypes, packed weights beside others or of unequal
            dtypes, or, outside autocast, base weights of another dtype than x.
        ValueError: no operand.
    """
    if not operands:
        raise ValueError("lora_linear needs at least one operand")
    plan = _plan(x, operands, lowered, precision)
    tensors = [tensor for o in operands for tensor in (_stored(o.weight), o.bias, o.a, o.b, o.b_bias)]
    outputs: tuple[torch.Tensor, ...] = _LoraLinear.apply(x, adapter_input, plan, *tensors)
    return outputs


def _plan(
    x: torch.Tensor,
    operands: Sequence[Operand],
    lowered: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    precision: Precision,
) -> _Plan:
    adapter_dtype = operands[0].a.dtype
    if x.dtype not in DTYPES or adapter_dtype not in DTYPES:
        raise TypeError(f"lora_linear takes float32, float16 and bfloat16, not {x.dtype}, adapters of {adapter_dtype}")
    if any(o.a.dtype != adapter_dtype or o.b.dtype != adapter_dtype for o in operands):
        raise TypeError("adapters of unequal dtypes cannot share a node")
    scalings = tuple(o.scaling for o in operands)
    autocast = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    low = autocast or (x.dtype if precision == "compute" else adapter_dtype)
    packed = tuple(o.weight for o in operands if isinstance(o.weight, Packed))
    if packed:
        if len(packed) < len(operands) or any(weight.dtype is not packed[0].dtype for weight in packed):
            raise TypeError("packed weights share a node with packed weights of their own dtype only")
        # PEFT casts the adapter's output to x's dtype unless autocast is on for CUDA, whatever the device.
        output = x.dtype
        if autocast is not None and torch.is_autocast_enabled("cuda"):
            output = torch.promote_types(x.dtype, autocast)
        return _Plan(scalings, autocast or packed[0].dtype, low, output, packed, lowered)
    if autocast is not None:
        return _Plan(scalings, autocast, autocast, autocast, (), lowered)
    if any(_stored(o.weight).dtype != x.dtype for o in operands):
        raise TypeError(f"x is {x.dtype} and a base weight is not; autocast is off")
    return _Plan(scalings, x.dtype, low, x.dtype, (), lowered)


def _stored(weight: torch.Tensor | Packed) -> torch.Tensor:
    return weight.stored if isinstance(weight, Packed) else weight


class _LoraLinear(torch.autograd.Function):
    """Inputs: x, x' or None, the plan, then weight, bias, a, b, b_bias of each operand.

    Every product is made by an in-place or ``out=`` call: those are not subject to autocast, so an autocast region
    around backward changes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, adapter_input: torch.Tensor | None, plan: _Plan, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases, a, b, b_biases = (tensors[i::5] for i in range(5))
        base, low = plan.base_dtype, plan.adapter_dtype
        flat = _flat(x)
        rows = _cast(flat, base)
        low_rows = _cast(_flat(adapter_input), low) if adapter_input is not None else rows
        if adapter_input is None and low is not base:
            low_rows = _cast(flat, low)
        weights_c = weights if plan.packed else [_cast(weight, base) for weight in weights]
        ranks = [first.shape[0] for first in a]
        firsts, seconds = zip(*plan.lowered, strict=True) if plan.lowered is not None else (a, b)
        # With out=, autocast leaves cat alone; otherwise it refuses float16 where its own dtype is bfloat16.
        stacked = firsts[0] if len(firsts) == 1 else torch.cat(firsts, out=firsts[0].new_empty(0))
        a_c = _cast(stacked, low)
        b_c = [_cast(second, low) for second in seconds]

        s = _product(low_rows, a_c.t())
        s_parts = _columns(s, ranks)
        parts = zip(s_parts, biases, b_c, b_biases, plan.scalings, strict=True)
        # As torch.matmul does: autograd forbids the caller's in-place operations on a view that a Function returns.
        outputs = [
            torch.ops.aten._unsafe_view(
                _project(rows, s_i, _unpacked(plan, weights_c, i), bias, b_i, b_bias, scaling, plan),
                (*x.shape[:-1], b_i.shape[0]),
            )
            for i, (s_i, bias, b_i, b_bias, scaling) in enumerate(parts)
        ]

        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_weight, needs_a, needs_b = any(needs[0::5]), any(needs[2::5]), any(needs[3::5])
        reads_x = needs_weight or (needs_a and adapter_input is None)
        ctx.save_for_backward(
            (rows if low is base else flat) if reads_x else None,
            low_rows if needs_a and adapter_input is not None else None,
            s if needs_b else None,
            a_c,
            *b_c,
            *(weights_c if needs_x else ()),
        )
        ctx.plan, ctx.shape = plan, x.shape
        ctx.ranks = ranks
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.x_dtype, ctx.low_dtype = x.dtype, None if adapter_input is None else adapter_input.dtype
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        plan, n = ctx.plan, len(grad_outputs)
        needs_x, needs_low, _, *needs = ctx.needs_input_grad
        grads: list[torch.Tensor | None] = [None] * len(needs)
        if all(grad is None for grad in grad_outputs):
            return (None, None, None, *grads)
        rows, low_rows, s, a, *rest = ctx.saved_tensors
        b, weights = rest[:n], rest[n:]
        dense = [None if grad is None else _rows(grad) for grad in grad_outputs]
        g = [None if g_i is None else _cast(g_i, plan.base_dtype) for g_i in dense]
        low_g = [None if g_i is None else _cast(g_i, plan.adapter_dtype) for g_i in dense]

        ds: Any = None
        if needs_x or needs_low or any(needs[2::5]):
            ds = _grad_s(low_g, b, plan.scalings, ctx.ranks)
        if any(needs[2::5]):
            low_rows = _cast(rows, plan.adapter_dtype) if low_rows is None else low_rows
            grads[2::5] = _product(ds.t(), low_rows, ctx.dtypes[2]).split(ctx.ranks)
        s_parts: Sequence[Any] = _columns(s, ctx.ranks) if s is not None else [None] * n
        for i, (g_i, low_g_i, s_i, scaling) in enumerate(zip(g, low_g, s_parts, plan.scalings, strict=True)):
            at = 5 * i
            if g_i is None or not needs[at + 2]:
                grads[at + 2] = None
            if g_i is None or low_g_i is None:
                continue
            if needs[at]:
                grads[at] = _product(g_i.t(), rows, ctx.dtypes[at])
            if needs[at + 1]:
                grads[at + 1] = g_i.sum(0, dtype=ctx.dtypes[at + 1])
            if needs[at + 3]:
                grads[at + 3] = _product(low_g_i.t(), s_i, ctx.dtypes[at + 3], scaling)
            if needs[at + 4]:
                grads[at + 4] = low_g_i.sum(0, dtype=torch.float32).mul_(scaling).to(ctx.dtypes[at + 4])

        grad_x = grad_low = None
        if needs_low:
            grad_low = _cast(_product(ds, a), ctx.low_dtype).view(ctx.shape)
        if needs_x:
            low_part = _product(ds, a) if ctx.low_dtype is None else None
            grad_x = _grad_x(low_part, g, weights, plan, ctx.x_dtype).view(ctx.shape)
        return (grad_x, grad_low, None, *grads)


def _project(
    rows: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    b: torch.Tensor,
    b_bias: torch.Tensor | None,
    scaling: float,
    plan: _Plan,
) -> torch.Tensor:
    """One y [N, O]. The adapter comes first: the base product is then added to it before any rounding."""
    dtype = plan.base_dtype
    y = s.new_empty((rows.shape[0], weight.shape[0]))
    same = s.dtype == dtype
    shift = _shift(bias if same else None, b_bias, scaling, s.dtype)
    if shift is not None:
        y.copy_(shift)
    y.addmm_(s, b.t(), beta=0 if shift is None else 1, alpha=scaling)
    if same:
        return _cast(y.addmm_(rows, weight.t()), plan.output_dtype)
    base = _product(rows, weight.t()) if bias is None else _biased_product(rows, weight.t(), bias.to(dtype))
    if plan.output_dtype is dtype:
        return torch.add(base, y, out=base)
    return _cast(torch.add(base, y), plan.output_dtype)


def _unpacked(plan: _Plan, weights: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """A weight as it is multiplied by. One that is unpacked is a new tensor: whoever asks uses it and lets it go."""
    if not plan.packed:
        return weights[index]
    _, state, unpack, _ = plan.packed[index]
    return _cast(unpack(weights[index], state), plan.base_dtype)


def _shift(
    bias: torch.Tensor | None, b_bias: torch.Tensor | None, scaling: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """The row that is added to every row of y, or None."""
    if b_bias is None:
        return bias
    scaled = b_bias.float() * scaling
    return (scaled if bias is None else scaled.add_(bias)).to(dtype)


def _grad_s(
    g: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor], scalings: Sequence[float], ranks: Sequence[int]
) -> torch.Tensor:
    """The gradient of S, [N, sum r]; zero in the columns of outputs that nobody used."""
    used = next(g_i for g_i in g if g_i is not None)
    ds = used.new_empty((used.shape[0], sum(ranks)))
    for part, g_i, b_i, scaling in zip(_columns(ds, ranks), g, b, scalings, strict=True):
        if g_i is None:
            part.zero_()
        else:
            part.addmm_(g_i, b_i, beta=0, alpha=scaling)
    return ds


def _grad_x(
    low_part: torch.Tensor | None,
    g: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    plan: _Plan,
    x_dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of x [N, K]: ``low_part`` plus the base layers' products.

    Where x is float32 and the products are not, the products of siblings are summed in float32, as autograd
    sums the gradients of an x that was cast once for each of them; so is a ``low_part`` of float32.
    """
    dtype, total, first = plan.base_dtype, None, True
    if low_part is not None:
        total = low_part if low_part.dtype is x_dtype else _cast(low_part, dtype)
    for i, g_i in enumerate(g):
        if g_i is None:
            continue
        if total is None:
            total = _product(g_i, _unpacked(plan, weights, i))
        elif total.dtype is dtype and (first or x_dtype == dtype):
            total.addmm_(g_i, _unpacked(plan, weights, i))
        else:
            total = _cast(total, torch.float32).add_(_product(g_i, _unpacked(plan, weights, i)))
        first = False
    assert total is not None  # the caller returned where every gradient is None
    return _cast(total, x_dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``; where there is nothing to do, without a call that costs more than the comparison."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [N, K]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _columns(stacked: torch.Tensor, ranks: Sequence[int]) -> Sequence[torch.Tensor]:
    """The columns of S that belong to each operand."""
    return (stacked,) if len(ranks) == 1 else torch.split_with_sizes(stacked, ranks, 1)


def _rows(grad: torch.Tensor) -> torch.Tensor:
    """[N, O], dense: several products read it, and each would copy an expanded gradient for itself."""
    return _flat(grad).contiguous()


def _product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype | None = None, scaling: float = 1.0
) -> torch.Tensor:
    """``scaling * left @ right`` in ``dtype`` (theirs where None), accumulated in float32."""
    if dtype is torch.float32 and left.dtype is not dtype and _can_widen(left.device.type):
        wide = torch.mm(left, right, out_dtype=dtype)
        return wide if scaling == 1.0 else wide.mul_(scaling)
    out = left.new_empty((left.shape[0], right.shape[1]))
    if scaling == 1.0:
        torch.mm(left, right, out=out)
    else:
        out.addmm_(left, right, beta=0, alpha=scaling)
    return out if dtype is None else _cast(out, dtype)


def _biased_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, left, right, out=left.new_empty((left.shape[0], right.shape[1])))


@functools.cache
def _can_widen(device_type: str) -> bool:
    """Whether half-precision products can leave as float32 without a rounding in between: torch 2.8 on CUDA."""
    return device_type == "cuda" and torch.version.hip is None and "dtype" in torch.ops.aten.mm.overloads()
