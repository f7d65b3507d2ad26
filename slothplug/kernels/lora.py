"""LoRA linears that share an input: y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T, in one autograd node.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. With A = [A_1; ..; A_n] stacked,

    S    = x A^T                                   one product for all n
    y_i  = s_i S_i B_i^T + b_i + s_i c_i           c_i is the bias of the adapter's second layer, if it has one
    y_i += x W_i^T                                 accumulated on it in float32 by the same product

so that no pass over y is spent on scaling or adding. Backward, with g_i the gradient of y_i:

    dS_i = s_i g_i B_i        dA = dS^T x          one product for all n
    dB_i = s_i g_i^T S_i      dx = dS A + sum_i g_i W_i          accumulated into one buffer
    dW_i = g_i^T x            db_i = sum of g_i's rows,  dc_i = s_i db_i

The scale is a factor of the products (``alpha``), never of a tensor. If the adapters are given another input x' than x
(x after dropout), S, dA and dS A belong to x' and the rest to x.

``Dtypes`` says in which dtypes the products are computed, and the caller decides that. If both products have one dtype,
they are summed in float32 and rounded once. Otherwise each is rounded to its own dtype before the sum. Gradients of A
and B have A's and B's dtype.

A base weight is multiplied through a ``BaseWeight``: ``DENSE`` if it is stored as [O, K], ``Packed`` if it is stored
otherwise (4 bits an element, as in Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023).
Each pass dequantises one packed weight at a time and keeps none: O_i K (e + 1/2) bytes more to move, once forward and
once for dx.

Cost for x [N, K], W_i [O_i, K], rank r_i, e bytes an element: forward 2 N K O_i + 2 N r_i (K + O_i) flops, of which the
first term is the base layer's own; it reads x twice in all and writes y_i twice. Backward is twice that, less the dW_i
of frozen weights. Saved for backward: x once, S [N, sum r_i], and references to (or casts of) W, A and B.

``project_down``, ``add_delta``, ``BaseWeight`` and the ``grad_*`` functions are the primitives: they know nothing of
autograd. They make every product by an in-place or ``out=`` call, which autocast does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from slothplug.kernels.early_saving import save, saved
from slothplug.kernels.matmul import dense_rows, matmul
from slothplug.kernels.once_differentiable import once_differentiable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Dequantize = Callable[[torch.Tensor, Any], torch.Tensor]
"""``dequantize(stored, state)``: a new [O, K] tensor."""


class Dtypes(NamedTuple):
    """Dtypes of one call's products.

    Attributes:
        base: x W^T and g W.
        adapter: S, S B^T and the gradients' products with S, A and B.
        output: y.
    """

    base: torch.dtype
    adapter: torch.dtype
    output: torch.dtype


class BaseWeight(Protocol):
    """How a base layer's stored weight is multiplied by.

    Holds no weight: the weight is an input of the autograd node, and backward gets it from the saved tensors.
    """

    def prepare(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What products in ``dtype`` are given, and what is saved for backward: ``stored`` or a cast of it."""

    def matmul(
        self, prepared: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        """``out = rows W^T + add``: rows [N, K], out [N, O], of one dtype; ``add`` is [O], or ``out`` to accumulate."""

    def matmul_grad_input(
        self, prepared: torch.Tensor, grad: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        """``out = grad W + add``: grad [N, O], out [N, K], of one dtype; ``add`` is ``out`` to accumulate."""


class DenseWeight:
    """A weight that is stored as [O, K]."""

    def prepare(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cast(stored, dtype)

    def matmul(
        self, prepared: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        _matmul_add(rows, prepared.t(), out, add)

    def matmul_grad_input(
        self, prepared: torch.Tensor, grad: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        _matmul_add(grad, prepared, out, add)


DENSE = DenseWeight()


class Packed(NamedTuple):
    """A frozen weight that is stored otherwise than it is multiplied by.

    Attributes:
        state: what ``dequantize`` needs beside the stored tensor.
        dequantize: ``dequantize(stored, state)`` returns a new tensor [O, K].
    """

    state: Any
    dequantize: Dequantize

    def prepare(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return stored

    def matmul(
        self, prepared: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        _matmul_add(rows, cast(self.dequantize(prepared, self.state), rows.dtype).t(), out, add)

    def matmul_grad_input(
        self, prepared: torch.Tensor, grad: torch.Tensor, *, out: torch.Tensor, add: torch.Tensor | None = None
    ) -> None:
        _matmul_add(grad, cast(self.dequantize(prepared, self.state), grad.dtype), out, add)


class Operand(NamedTuple):
    """One LoRA linear. The base layer and both parts of the adapter may be trainable or frozen.

    The gradients of several operands' a's are disjoint parts of one tensor: in-place operations on one do not reach the
    others, and the memory is freed when the last of them is.

    Attributes:
        weight: [O, K], the base layer's, or what ``base`` makes it of.
        bias: [O] or None, the base layer's.
        a: [r, K].
        b: [O, r], of a's dtype.
        scaling: factor of the adapter's output.
        b_bias: [O] or None, added to S B^T before the scaling.
        base: how ``weight`` is multiplied by.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    b_bias: torch.Tensor | None = None
    base: BaseWeight = DENSE


class Factors(NamedTuple):
    """The factors of operands, detached, in the dtype of the adapters' products.

    Attributes:
        a: [sum r_i, K], the A's one below the other.
        b: each [O_i, r_i].
    """

    a: torch.Tensor
    b: Sequence[torch.Tensor]


def lora_linear(
    x: torch.Tensor,
    operands: Sequence[Operand],
    dtypes: Dtypes,
    *,
    adapter_input: torch.Tensor | None = None,
    factors: Factors | None = None,
) -> tuple[torch.Tensor, ...]:
    """Applies LoRA linears that share an input.

    Args:
        x: [..., K], float32, float16 or bfloat16, any strides.
        operands: one or more, of any ranks and output sizes; packed weights are frozen.
        dtypes: of the products and of the outputs. ``output`` is ``base``, or may differ if all weights are packed.
        adapter_input: x' [..., K], what the adapters read instead of x: x after dropout. None if they read x.
        factors: casts of the operands' A and B, if the caller has them; by default they are cast here.

    Returns:
        One [..., O_i] of ``dtypes.output`` for each operand, differentiable once in every tensor. The gradients of the
        A's may share one storage, without overlap.

    Raises:
        TypeError: a dtype other than the three, or adapters of unequal dtypes.
        ValueError: no operand.
    """
    if not operands:
        raise ValueError("lora_linear needs at least one operand")
    adapter_dtype = operands[0].a.dtype
    if x.dtype not in DTYPES or adapter_dtype not in DTYPES:
        raise TypeError(f"lora_linear takes float32, float16 and bfloat16, not {x.dtype}, adapters of {adapter_dtype}")
    if any(o.a.dtype is not adapter_dtype or o.b.dtype is not adapter_dtype for o in operands):
        raise TypeError("adapters of unequal dtypes cannot share a node")
    call = _Call(dtypes, tuple(o.scaling for o in operands), tuple(o.base for o in operands), factors)
    tensors = [tensor for o in operands for tensor in (o.weight, o.bias, o.a, o.b, o.b_bias)]
    outputs: tuple[torch.Tensor, ...] = _LoraLinear.apply(x, adapter_input, call, *tensors)
    return outputs


class _Call(NamedTuple):
    """Non-tensor and non-differentiable arguments of one call."""

    dtypes: Dtypes
    scalings: tuple[float, ...]
    bases: tuple[BaseWeight, ...]
    factors: Factors | None


class _LoraLinear(torch.autograd.Function):
    """Inputs: x, x' or None, the call, then weight, bias, a, b, b_bias of each operand."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, adapter_input: torch.Tensor | None, call: _Call, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases, a, b, b_biases = (tensors[i::5] for i in range(5))
        dtypes, scalings, bases, factors = call
        same = dtypes.adapter is dtypes.base
        flat = dense_rows(_flat(x))
        rows = cast(flat, dtypes.base)
        if adapter_input is not None:
            adapter_rows = cast(dense_rows(_flat(adapter_input)), dtypes.adapter)
        else:
            adapter_rows = rows if same else cast(flat, dtypes.adapter)
        stacked_a, cast_b = factors or _cast_factors(a, b, dtypes.adapter)
        prepared = [base.prepare(weight, dtypes.base) for base, weight in zip(bases, weights, strict=True)]

        ranks = [first.shape[0] for first in a]
        s = project_down(adapter_rows, stacked_a)
        needs_x, _, _, *needs = ctx.needs_input_grad
        needs_a = any(needs[2::5])
        reads_x = any(needs[0::5]) or (needs_a and adapter_input is None)
        save(
            ctx,
            (rows if same else flat) if reads_x else None,
            adapter_rows if needs_a and adapter_input is not None else None,
            s if any(needs[3::5]) else None,
            stacked_a,
            *cast_b,
            *(prepared if needs_x else ()),
        )
        outputs = []
        for i, s_i in enumerate(_columns(s, ranks)):
            y = _project(rows, s_i, prepared[i], bases[i], biases[i], cast_b[i], b_biases[i], scalings[i], dtypes)
            # As torch.matmul does: autograd forbids in-place operations on a view that a Function returns.
            outputs.append(y if x.ndim == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])))

        ctx.call, ctx.shape, ctx.ranks = call._replace(factors=None), x.shape, ranks
        ctx.input_dtypes = [None if tensor is None else tensor.dtype for tensor in (x, adapter_input, *tensors)]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        (dtypes, scalings, bases, _), n = ctx.call, len(grad_outputs)
        needs_x, needs_adapter_input, _, *needs = ctx.needs_input_grad
        grads: list[torch.Tensor | None] = [None] * len(needs)
        if all(grad is None for grad in grad_outputs):
            return (None, None, None, *grads)
        rows, adapter_rows, s, stacked_a, *rest = saved(ctx)
        cast_b, prepared = rest[:n], rest[n:]
        x_dtype, adapter_input_dtype, *tensor_dtypes = ctx.input_dtypes
        # Several products read a gradient, and each would copy an expanded one for itself.
        dense = [None if grad is None else _flat(grad).contiguous() for grad in grad_outputs]
        g = [None if grad is None else cast(grad, dtypes.base) for grad in dense]
        adapter_g = [None if grad is None else cast(grad, dtypes.adapter) for grad in dense]

        needs_a = any(needs[2::5])
        ds: Any = None
        if needs_x or needs_adapter_input or needs_a:
            ds = grad_s(adapter_g, cast_b, scalings, ctx.ranks)
        if needs_a:
            adapter_rows = cast(rows, dtypes.adapter) if adapter_rows is None else adapter_rows
            grads[2::5] = grad_a(ds, adapter_rows, ctx.ranks, tensor_dtypes[2])
        s_parts: Sequence[Any] = _columns(s, ctx.ranks) if s is not None else [None] * n
        for i, (g_i, adapter_g_i) in enumerate(zip(g, adapter_g, strict=True)):
            own, own_dtypes = slice(5 * i, 5 * i + 5), tensor_dtypes[5 * i : 5 * i + 5]
            needs_i = needs[own]
            if g_i is None or adapter_g_i is None:
                grads[own] = [None] * 5
                continue
            grads[own] = [
                matmul(g_i.t(), rows, own_dtypes[0]) if needs_i[0] else None,
                g_i.sum(0, dtype=own_dtypes[1]) if needs_i[1] else None,
                grads[own][2] if needs_i[2] else None,
                grad_b(adapter_g_i, s_parts[i], scalings[i], own_dtypes[3]) if needs_i[3] else None,
                adapter_g_i.sum(0, dtype=torch.float32).mul_(scalings[i]).to(own_dtypes[4]) if needs_i[4] else None,
            ]

        grad_x = grad_adapter_input = None
        delta = matmul(ds, stacked_a) if needs_adapter_input or (needs_x and adapter_input_dtype is None) else None
        if needs_adapter_input and delta is not None:
            grad_adapter_input = cast(delta, adapter_input_dtype).view(ctx.shape)
            delta = None
        if needs_x:
            grad_x = grad_input(delta, g, prepared, bases, ctx.shape[-1], x_dtype).view(ctx.shape)
        return (grad_x, grad_adapter_input, None, *grads)


def project_down(rows: torch.Tensor, a: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """S = x A^T, [N, sum r]: rows [N, K] as ``dense_rows`` has them, the stacked a [sum r, K], of one dtype."""
    if out is None:
        out = rows.new_empty((rows.shape[0], a.shape[0]))
    return torch.mm(rows, a.t(), out=out)


def add_delta(out: torch.Tensor, s: torch.Tensor, b: torch.Tensor, scaling: float, accumulate: bool) -> None:
    """``out (+)= scaling S_i B_i^T``: s [N, r], also columns of S, b [O, r] and out [N, O], all of one dtype."""
    out.addmm_(dense_rows(s), b.t(), beta=int(accumulate), alpha=scaling)


def grad_s(
    grads: Sequence[torch.Tensor | None],
    b: Sequence[torch.Tensor],
    scalings: Sequence[float],
    ranks: Sequence[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of S, [N, sum r]; zero in the columns of outputs without a gradient.

    Args:
        grads: of each output, [N, O_i] dense in the adapters' dtype; at least one is not None.
        b: each [O_i, r_i] of that dtype.
        out: [N, sum r] of that dtype.
    """
    if out is None:
        used = next(grad for grad in grads if grad is not None)
        out = used.new_empty((used.shape[0], sum(ranks)))
    for columns, grad, b_i, scaling in zip(_columns(out, ranks), grads, b, scalings, strict=True):
        if grad is None:
            columns.zero_()
        else:
            columns.addmm_(grad, b_i, beta=0, alpha=scaling)
    return out


def grad_a(
    ds: torch.Tensor, rows: torch.Tensor, ranks: Sequence[int], dtype: torch.dtype
) -> Sequence[torch.Tensor | None]:
    """The gradient of each A_i [r_i, K] in ``dtype``: parts of one product of ds [N, sum r] and rows [N, K]."""
    stacked = matmul(ds.t(), rows, dtype)
    return (stacked,) if len(ranks) == 1 else stacked.split(ranks)


def grad_b(grad: torch.Tensor, s: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of B_i [O_i, r_i] in ``dtype``: grad [N, O_i] and s [N, r_i] of one dtype."""
    return matmul(grad.t(), s, dtype, scaling)


def grad_input(
    delta: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    prepared: Sequence[torch.Tensor],
    bases: Sequence[BaseWeight],
    size_in: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of x [N, K] in ``dtype``: the adapters' share plus the base layers' products.

    If x is float32 and the products are not, the products of siblings are summed in float32, as autograd sums the
    gradients of an x that was cast once for each of them. A float32 ``delta`` is summed in float32 as well.

    Args:
        delta: dS A, [N, K], or None; the base layers' products are accumulated into it if the dtypes allow.
        grads: of each output, [N, O_i] dense in the dtype of the base products; at least one is not None.
    """
    base_dtype = next(grad.dtype for grad in grads if grad is not None)
    total, first = delta, True
    if total is not None and total.dtype is not dtype:
        total = cast(total, base_dtype)
    for grad, weight, base in zip(grads, prepared, bases, strict=True):
        if grad is None:
            continue
        if total is not None and total.dtype is base_dtype and (first or dtype is base_dtype):
            base.matmul_grad_input(weight, grad, out=total, add=total)
        else:
            share = grad.new_empty((grad.shape[0], size_in))
            base.matmul_grad_input(weight, grad, out=share)
            total = share if total is None else cast(total, torch.float32).add_(share)
        first = False
    assert total is not None  # at least one gradient is not None
    return cast(total, dtype)


def _project(
    rows: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    base: BaseWeight,
    bias: torch.Tensor | None,
    b: torch.Tensor,
    b_bias: torch.Tensor | None,
    scaling: float,
    dtypes: Dtypes,
) -> torch.Tensor:
    """One y [N, O]. The adapter comes first: the base product is then added to it before any rounding."""
    same = dtypes.adapter is dtypes.base
    y = s.new_empty((rows.shape[0], b.shape[0]))
    row = _row(bias if same else None, b_bias, scaling, dtypes.adapter)
    if row is not None:
        y.copy_(row)
    add_delta(y, s, b, scaling, accumulate=row is not None)
    if same:
        base.matmul(weight, rows, out=y, add=y)
        return cast(y, dtypes.output)
    product = rows.new_empty(y.shape)
    base.matmul(weight, rows, out=product, add=None if bias is None else cast(bias, dtypes.base))
    if dtypes.output is dtypes.base:
        return product.add_(y)
    return cast(torch.add(product, y), dtypes.output)


def _row(
    bias: torch.Tensor | None, b_bias: torch.Tensor | None, scaling: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """The row that is added to every row of y, or None."""
    if b_bias is None:
        return bias
    scaled = b_bias.float() * scaling
    return (scaled if bias is None else scaled.add_(bias)).to(dtype)


def _cast_factors(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], dtype: torch.dtype) -> Factors:
    # With out=, autocast leaves cat alone; otherwise it refuses float16 if its own dtype is bfloat16.
    stacked = a[0] if len(a) == 1 else torch.cat(list(a), out=a[0].new_empty(0))
    return Factors(cast(stacked, dtype), [cast(second, dtype) for second in b])


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``; if there is nothing to do, without a call that costs more than the comparison."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [N, K]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _columns(stacked: torch.Tensor, ranks: Sequence[int]) -> Sequence[torch.Tensor]:
    """The columns of S that belong to each operand."""
    return (stacked,) if len(ranks) == 1 else torch.split_with_sizes(stacked, ranks, 1)


def _matmul_add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None) -> None:
    if add is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(add, left, right, out=out)
