"""Adapter factors are cast once a call, together, and no cast outlives the values it was made from."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slothplug
from slothplug.patching.served import STATE
from tests.patching.device import DEVICE

pytestmark = pytest.mark.core

IDS = torch.arange(48).view(2, 24)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def adapted(tiny_llama: Callable[..., nn.Module]) -> nn.Module:
    """A bfloat16 model with float32 adapters, as autocast training has them."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    model = get_peft_model(tiny_llama().bfloat16(), lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.config.use_cache = False
    return model.train()


class CountCasts(TorchDispatchMode):
    """Counts copies of two-dimensional float32 tensors of an adapter's size to bfloat16, and multi-tensor copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float32 and 4 in args[0].shape:
            self.counts["one"] += kwargs.get("dtype") is torch.bfloat16
        if func is torch.ops.aten._foreach_copy_.default:
            self.counts["together"] += 1
        return func(*args, **kwargs)


def autocast_loss(model: nn.Module) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    autocast_loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_from_the_second_call_on_factors_are_cast_together(adapted: nn.Module, checkpointing: bool) -> None:
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    slothplug.patch(adapted, {"ops": ["lora"]})
    step(adapted)
    with CountCasts() as casts:
        step(adapted)
    assert casts.counts == {"together": 1}, "forward, and recompute where there is one"


def without_history(model: nn.Module) -> nn.Module:
    """A patched copy with the same weights that has cast nothing yet."""
    fresh = copy.deepcopy(model)
    slothplug.unpatch(fresh)
    slothplug.patch(fresh, {"ops": ["lora"]})
    return fresh


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("write", ["optimizer", "data"])
def test_steps_that_raise_no_version_are_seen(adapted: nn.Module, write: str, checkpointing: bool) -> None:
    """Fused optimizers and writes through ``.data`` leave ``_version`` as it was."""
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    slothplug.patch(adapted, {"ops": ["lora"]})
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, fused=True)
    for _ in range(3):
        step(adapted)
        versions = [p._version for p in trained]
        if write == "optimizer":
            optimizer.step()
        else:
            for parameter in trained:
                parameter.data.mul_(1.5)
        assert [p._version for p in trained] == versions
        expected = step(without_history(adapted))
        for name, gradient in step(adapted).items():
            assert torch.equal(gradient, expected[name]), name


def test_a_call_of_the_inner_model_and_its_recompute_use_the_weights_of_that_time(adapted: nn.Module) -> None:
    """Outside of an outermost call nothing says when weights change, and the recompute comes without one."""
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    slothplug.patch(adapted, {"ops": ["lora"]})
    step(adapted)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(3.0)
    fresh = without_history(adapted)
    grads = []
    for model in (adapted, fresh):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            hidden = model.base_model.model.model(input_ids=IDS).last_hidden_state
        hidden.float().square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])


def test_a_recompute_after_a_call_in_inference_mode(adapted: nn.Module) -> None:
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    slothplug.patch(adapted, {"ops": ["lora"]})
    expected = {name: gradient.clone() for name, gradient in step(adapted).items()}
    adapted.zero_grad()
    loss = autocast_loss(adapted)
    with torch.inference_mode():
        autocast_loss(adapted)
    loss.backward()
    for name, parameter in adapted.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, expected[name]), name


def test_a_deep_copy_casts_its_own_factors(adapted: nn.Module) -> None:
    slothplug.patch(adapted, {"ops": ["lora"]})
    duplicate = copy.deepcopy(adapted)
    states = [module.__dict__[STATE] for module in duplicate.modules() if STATE in module.__dict__]
    owners = {state.context for state in states}
    assert len(owners) == 1, "the layers and the outermost model"
    assert owners.isdisjoint(module.__dict__[STATE].context for module in adapted.modules() if STATE in module.__dict__)
    for model in (adapted, duplicate):
        step(model)
    with CountCasts() as casts:
        for model in (adapted, duplicate):
            step(model)
    assert casts.counts == {"together": 2}


def test_a_parameter_in_other_memory_is_cast_where_it_is_used(adapted: nn.Module) -> None:
    """As ZeRO-3 and FSDP do it: the same parameter, other storage, while its layer runs."""
    slothplug.patch(adapted, {"ops": ["lora"]})
    step(adapted)

    def give_other_values(layer: nn.Module, _: object) -> None:
        for attention in ("q_proj", "k_proj", "v_proj"):
            for factor in (getattr(layer, attention).lora_A, getattr(layer, attention).lora_B):
                factor.default.weight.data = factor.default.weight.data * 2.0

    fresh = without_history(adapted)
    for model in (adapted, fresh):
        model.base_model.model.model.layers[1].self_attn.register_forward_pre_hook(give_other_values)
    assert torch.equal(autocast_loss(adapted), autocast_loss(fresh))


def test_a_hook_that_writes_factors_within_the_call_is_heard(adapted: nn.Module) -> None:
    """Weights that are streamed into a fixed buffer, or noise on them: same memory, written after the call began."""

    def factors_of(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
        layer = model.get_submodule("base_model.model.model.layers.1")
        return layer, [parameter for name, parameter in layer.named_parameters() if "lora_B" in name]

    def grow(factors: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for factor in factors:
                factor.mul_(3.0)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            found: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
        return found

    within, before = copy.deepcopy(adapted), copy.deepcopy(adapted)
    slothplug.patch(within)
    slothplug.patch(before)
    layer, written = factors_of(within)
    layer.register_forward_pre_hook(lambda *_: grow(written))
    for _ in range(3):
        grow(factors_of(before)[1])
        assert torch.equal(loss(within), loss(before))
