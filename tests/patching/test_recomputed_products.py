"""What a checkpoint recomputes in the backward: everything that is read there, and no product that nobody reads."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from slothplug.kernels.lora import Dtypes, Operand, lora_linear
from tests.patching.device import cpu_only
from tests.patching.lora_models import IDS, PROJECTIONS, assert_equal, pair, step


class Products(TorchDispatchMode):
    """Counts products by the weight of a linear layer that are as large as its output."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._linears = {
            module.base_layer.weight.data_ptr(): (name.rpartition(".")[2], module.out_features)
            for name, module in model.named_modules()
            if name.endswith(PROJECTIONS)
        }

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            for argument in args:
                name, size = self._linears.get(argument.data_ptr(), ("", 0)) if torch.is_tensor(argument) else ("", 0)
                if size and out.shape == (IDS.numel(), size):
                    self.found[name] += 1
        return out


@cpu_only
def test_the_last_layers_product_is_not_made_again() -> None:
    fast, stock, _ = pair()
    expected = step(stock)
    for one in (fast, stock):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    step(fast)
    loss = fast(input_ids=IDS, labels=IDS).loss
    fast.zero_grad()
    with Products(fast) as products:
        loss.backward()
    # Square layers have a gradient of their input of the same size: those of q, k, v and o count twice.
    assert products.found["down_proj"] == 0
    assert {products.found[name] for name in ("gate_proj", "up_proj")} == {fast.config.num_hidden_layers}
    assert_equal(step(fast), expected)


def operand(size_in: int = 6, size_out: int = 5) -> Operand:
    torch.manual_seed(0)
    weight, a, b = torch.randn(size_out, size_in), torch.randn(2, size_in), torch.randn(size_out, 2)
    return Operand(weight, None, a.requires_grad_(), b.requires_grad_(), 2.0)


FLOAT = Dtypes(torch.float32, torch.float32, torch.float32)


def run(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    one = operand()
    (y,) = lora_linear(x, [one], FLOAT)
    return y, [x, one.a, one.b]


def test_hooks_get_every_tensor_once_and_backward_gives_them_back() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    y, leaves = run(x)
    expected = torch.autograd.grad(y.square().sum(), leaves)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    with saved_tensors_hooks(pack, lambda index: packed[index].clone()):
        y, leaves = run(x)
    assert packed[0] is x  # a leaf itself
    assert all(tensor.is_leaf for tensor in packed)  # of others nothing but the values
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), leaves), expected))
    with save_on_cpu():
        y, leaves = run(x)
        y = y.square().sum()
    assert all(map(torch.equal, torch.autograd.grad(y, leaves), expected))


def test_a_second_backward_needs_the_first_to_retain_the_graph() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with save_on_cpu():
        y, leaves = run(x)
    y = y.sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y, leaves), first))
    with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
        torch.autograd.grad(y, leaves)


def test_what_is_saved_goes_with_the_backward_or_with_the_graph() -> None:
    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    for backward in (True, False):
        alive: list[weakref.ref[Packed]] = []

        def pack(tensor: torch.Tensor, alive: list[weakref.ref[Packed]] = alive) -> Packed:
            packed = Packed(tensor)
            alive.append(weakref.ref(packed))
            return packed

        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            y, leaves = run(torch.randn(4, 6, requires_grad=True))
        assert all(reference() is not None for reference in alive)
        if backward:
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        else:
            del y
        assert all(reference() is None for reference in alive)
