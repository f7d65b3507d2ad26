"""The product of a gated MLP is made again for the backward: nobody keeps it, and nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import slothplug
from slothplug.patching.served import STATE
from tests.architectures.step import Step
from tests.patching.architectures import IDS, LABELS, assert_same_step, step, tiny
from tests.patching.device import DEVICE

ADAPTED = ["gate_proj", "up_proj", "down_proj"]


def mlp_of(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))


def with_adapters(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=ADAPTED, lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny("llama"),
    "packed": lambda: tiny("phi3"),
    "adapters": lambda: with_adapters(tiny("llama")),
    "dropout": lambda: with_adapters(tiny("llama"), dropout=0.1),
}


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(2, 7, 64, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE, requires_grad=True)


def product_is_alive_after_forward(mlp: Any, x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Whether anybody keeps what the kernel of a served MLP returned, and the MLP's output."""
    served, products = mlp.__dict__[STATE], []
    kernel = served.kernel

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        product = kernel(*args, **kwargs)
        products.append(StorageWeakRef(product.untyped_storage()))
        return product

    served.kernel = noting
    output = mlp(x)
    gc.collect()
    return not products[0].expired(), output


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "packed", "adapters"])
def test_it_is_not_kept(name: str, autocast: bool, rows: torch.Tensor) -> None:
    model = MODELS[name]()
    slothplug.patch(model)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        alive, output = product_is_alive_after_forward(mlp_of(model), rows)
    assert not alive
    output.sum().backward()


def test_it_is_not_kept_without_a_backward_either(rows: torch.Tensor) -> None:
    """A graph that is dropped takes gate and up with it, without the garbage collector."""
    model = MODELS["adapters"]()
    slothplug.patch(model)
    mlp, kept = mlp_of(model), []
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.register_forward_hook(lambda _, args, out: kept.append(StorageWeakRef(out.untyped_storage())))
    gc.disable()
    try:
        output = mlp(rows)
        assert not any(one.expired() for one in kept)
        del output
        assert all(one.expired() for one in kept)
    finally:
        gc.enable()


@contextmanager
def kept_as_in_stock() -> Iterator[None]:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name: str, autocast: bool) -> None:
    steps = []
    for way in (torch.enable_grad, kept_as_in_stock):
        model = MODELS[name]()
        slothplug.patch(model)
        torch.manual_seed(5)
        with way(), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=IDS, labels=LABELS).loss
        loss.backward()
        steps.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(got, expected) for got, expected in zip(*steps, strict=True))


def test_the_kernel_runs_once_more_in_the_backward(rows: torch.Tensor) -> None:
    model = MODELS["adapters"]()
    slothplug.patch(model)
    mlp = mlp_of(model)
    served, calls = mlp.__dict__[STATE], []
    kernel = served.kernel

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((torch.is_grad_enabled(), torch.is_autocast_enabled(DEVICE)))
        return kernel(*args, **kwargs)

    served.kernel = counted
    with torch.autocast(DEVICE, torch.bfloat16):
        output = mlp(rows)
    output.sum().backward(retain_graph=True)
    assert calls == [(True, True), (False, True)]
    first = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
    mlp.zero_grad()
    output.sum().backward()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(first, (p for p in mlp.parameters() if p.requires_grad), strict=True)
    )
    assert len(calls) == 3


def written_before(mlp: Any) -> None:
    def double(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        with torch.no_grad():
            args[0].mul_(2)

    mlp.down_proj.register_forward_pre_hook(double)


def written_without_a_version(mlp: Any) -> None:
    mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].data.mul_(2), None)[1])


def negated(mlp: Any) -> None:
    down = mlp.down_proj
    down.forward = lambda h: torch.nn.functional.linear(torch._neg_view(h), down.weight)


def sparse(mlp: Any) -> None:
    down = mlp.down_proj
    down.forward = lambda h: torch.nn.functional.linear(h.flatten(0, 1), down.weight.detach().to_sparse_csr()).view(
        *h.shape[:2], -1
    )


def transformed(mlp: Any) -> None:
    down = mlp.down_proj
    down.forward = lambda h: torch.func.vjp(lambda a: torch.nn.functional.linear(a, down.weight), h)[0]


def replaced_before(mlp: Any) -> None:
    mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def a_part_is_read(mlp: Any) -> None:
    down = mlp.down_proj
    down.forward = lambda h: (
        torch.nn.functional.linear(h[:, :3], down.weight).sum(1, keepdim=True).expand(*h.shape[:2], -1)
    )


def checkpointed(mlp: Any) -> None:
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda h: checkpoint(forward, h, use_reentrant=False)


CHANGES = [
    written_before, written_without_a_version, replaced_before, a_part_is_read, negated, sparse, transformed,
    checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_last_layer_that_is_changed_saves_what_it_reads(
    change: Callable[[nn.Module], None], rows: torch.Tensor
) -> None:
    found = []
    for patched in (True, False):
        model = MODELS["llama"]()
        if patched:
            slothplug.patch(model)
        mlp: Any = mlp_of(model)
        change(mlp)
        x = rows.detach().requires_grad_()
        loss = mlp(x).square().sum()
        loss.backward()
        found.append(
            Step(
                loss.detach(),
                {"x": x.grad} | {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None},
            )
        )
    assert_same_step(*found)


@pytest.mark.parametrize("what", ["gate_proj", "down_proj"])
def test_a_write_between_forward_and_backward_raises(what: str, rows: torch.Tensor) -> None:
    """Into a weight of the last layer, as in stock; into what the gate returned, of which the product would be made."""
    model = MODELS["llama"]()
    slothplug.patch(model)
    mlp: Any = mlp_of(model)
    outputs: list[torch.Tensor] = []
    mlp.gate_proj.register_forward_hook(lambda _, args, out: outputs.append(out))
    out = mlp(rows)
    written = outputs[0] if what == "gate_proj" else mlp.down_proj.weight
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), [mlp.down_proj.weight] if what == "gate_proj" else [rows])


def test_a_weight_given_other_memory_is_read_there(rows: torch.Tensor) -> None:
    """As engines do that shard: what the forward read is gone, and the backward finds the same values elsewhere."""
    model = with_adapters(MODELS["llama"]())
    slothplug.patch(model)
    mlp: Any = mlp_of(model)
    weight = mlp.down_proj.base_layer.weight
    mlp(rows).sum().backward()
    expected, rows.grad = rows.grad, None
    out = mlp(rows)
    memory = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.detach().clone()
    assert memory.expired()
    out.sum().backward()
    assert torch.equal(rows.grad, expected)


def test_a_write_into_the_gate_before_the_last_layer_raises(rows: torch.Tensor) -> None:
    model = MODELS["llama"]()
    slothplug.patch(model)
    mlp: Any = mlp_of(model)
    served, gates = mlp.__dict__[STATE], []
    kernel = served.kernel

    def keeping(gate: torch.Tensor, up: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        gates.append(gate)
        return kernel(gate, up, **kwargs)

    served.kernel = keeping
    weight = mlp.down_proj.weight

    class Writes(nn.Parameter):
        """Writes into the gate when the layer multiplies by it."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.linear:
                with torch.no_grad():
                    gates[0].zero_()
            return super().__torch_function__(func, types, args, kwargs or {})

    mlp.down_proj.weight = Writes(weight.detach().clone())
    out = mlp(rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), [mlp.down_proj.weight])


@pytest.mark.timeout(3600)  # it compiles, and a busy machine takes many times its CPU time
def test_compiled_autograd() -> None:
    losses = []
    for patched in (True, False):
        model = MODELS["llama"]()
        if patched:
            slothplug.patch(model, {"ops": ["glu"]})
        loss = model(input_ids=IDS, labels=LABELS).loss
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        losses.append(Step(loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_same_step(*losses)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant: bool) -> None:
    model, stock = MODELS["adapters"](), MODELS["adapters"]()
    slothplug.patch(model)
    for one in (model, stock):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model), step(stock))


def test_hooks_of_others_see_every_tensor(rows: torch.Tensor) -> None:
    model = MODELS["llama"]()
    slothplug.patch(model)
    mlp: Any = mlp_of(model)
    shapes: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape[-1:])
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(rows)
    width = mlp.down_proj.in_features
    assert sum(shape == (width,) for shape in shapes) >= 3  # gate, up and their product
    with save_on_cpu():
        mlp(rows).sum().backward()
    with disable_saved_tensors_hooks("not here"):
        mlp(rows).sum().backward()
