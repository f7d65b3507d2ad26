"""What is decided once for each outermost call, and every change that undoes the decision."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.hookspecs import hookimpl
from slothplug.patching import eligibility
from slothplug.patching.forward_context import current_forward, facts_of
from slothplug.patching.served import STATE, Served
from slothplug.patching.sites import Kernel, Operation, Refusal, Site
from slothplug.patching.watch import Watch

X = torch.ones(2, 4)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.options = {"factor": 2.0}
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.options["factor"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Identity()
        self.layers = nn.ModuleList(Scaling() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


for cls in (Scaling, Model):
    cls.forward.__module__ = "transformers.for_a_test"  # as code of the user's own they would not be bound


def bind(module: Any, served: Served[None, None], watch: Watch) -> Any:
    own = module.__dict__
    inner = watch.item(own["_modules"], "inner")
    if watch.type_of(inner) is not nn.Identity or not watch.unhooked(module):
        return Refusal("not as it was made")
    weight = watch.tensor(watch.item(own["_parameters"], "weight"))
    return weight, watch.item(watch.item(own, "options"), "factor")


def fast(module: Any, served: Served[None, None], x: torch.Tensor) -> torch.Tensor:
    forward = current_forward(served.context)
    SEEN.append((facts_of(served), forward and forward.binding))
    return served.calls.serve(served.original(module, x))


SEEN: list[tuple[Any, Any]] = []


class Plugin:
    @hookimpl
    def slothplug_operations(self) -> list[Operation]:
        return [Operation("scaling", "for a test")]

    @hookimpl
    def slothplug_find_sites(self, model: nn.Module) -> Iterator[Site[None]]:
        for name, module in model.named_modules():
            if isinstance(module, Scaling):
                kernel = Kernel("scaling", "torch", torch.mul)
                yield Site("scaling", name, module, fast, None, kernel, lambda: None, "scaling", bind)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    plugin = Plugin()
    slothplug.plugin_manager().register(plugin)
    SEEN.clear()
    model = Model()
    slothplug.patch(model)
    yield model
    slothplug.plugin_manager().unregister(plugin)


def call(model: nn.Module) -> tuple[Any, Any]:
    """Facts and binding of the first layer in one call."""
    SEEN.clear()
    model(X)
    return SEEN[0]


def test_the_same_binding_holds_for_every_call_while_nothing_changes(model: nn.Module) -> None:
    facts, binding = call(model)
    assert facts == (model.layers[0].weight, 2.0)
    assert binding is not None
    assert all(call(model)[1] is binding for _ in range(3))


CHANGES: dict[str, Callable[[Any], object]] = {
    "an item": lambda layer: layer.options.update(factor=5.0),
    "a container": lambda layer: setattr(layer, "options", {"factor": 2.5}),
    "a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4))),
    "a parameter's data": lambda layer: setattr(layer.weight, "data", torch.ones(4)),
    "a dtype": lambda layer: layer.to(torch.float64),
    "a child": lambda layer: setattr(layer, "inner", nn.Dropout()),
    "a child's class": lambda layer: setattr(layer.inner, "__class__", nn.Dropout),
    "a forward on the instance": lambda layer: setattr(layer, "forward", lambda x: x),
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "a hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "a hook below": lambda layer: layer.inner.register_forward_pre_hook(lambda *_: None),
}


def test_a_refusal_ends_when_what_it_was_made_of_changes(model: nn.Module) -> None:
    handle = model.layers[0].register_full_backward_hook(lambda *_: None)
    facts, _ = call(model)
    assert isinstance(facts, Refusal)
    handle.remove()
    facts, _ = call(model)
    assert facts == (model.layers[0].weight, 2.0)


def test_one_inert_hook_in_place_of_another_is_a_change(model: nn.Module) -> None:
    def inert(*_: object) -> None:
        return None

    inert.__module__ = "transformers.modeling_utils"
    handle = model.embedding.register_forward_hook(inert)
    _, binding = call(model)
    handle.remove()
    model.embedding.register_forward_hook(lambda *_: None)
    assert binding is not None
    assert call(model) == (None, None)


def test_forwards_of_the_users_own_switch_it_off(model: nn.Module) -> None:
    call(model)
    model.embedding.forward = lambda x: x
    assert call(model) == (None, None)
    del model.embedding.forward
    assert call(model)[1] is not None
    model.embedding.__class__ = type("Mine", (nn.Identity,), {"forward": lambda self, x: x})
    assert call(model) == (None, None)


def test_each_root_has_a_binding_of_its_own(model: nn.Module) -> None:
    wrapper = nn.Sequential(model)
    slothplug.patch(wrapper)
    call(model)
    wrapper.register_forward_pre_hook(lambda *_: None)
    call(wrapper)
    assert call(model)[1] is not None


def test_a_bind_that_raises_leaves_its_module_to_decide(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model.layers[0].options = {}
    with pytest.raises(KeyError, match="factor"):  # of the stock forward
        model(X)
    assert "bind of scaling failed" in caplog.text


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_at_the_next_call(model: nn.Module, change: Callable[[Any], object]) -> None:
    _, binding = call(model)
    change(model.layers[1])
    _, anew = call(model)
    assert anew is not binding
    assert call(model)[1] is anew


def test_a_module_that_refuses_says_so_and_the_others_are_bound(model: nn.Module) -> None:
    model.layers[0].inner = nn.Dropout()
    call(model)
    assert isinstance(SEEN[0][0], Refusal)
    assert SEEN[1][0] == (model.layers[1].weight, 2.0)


def test_nothing_is_bound_where_a_part_is_called_by_itself(model: nn.Module) -> None:
    call(model)
    SEEN.clear()
    model.layers[0](X)
    assert SEEN == [(None, None)]


def test_foreign_hooks_switch_it_off_and_transformers_own_do_not(model: nn.Module) -> None:
    def hook(*_: object) -> None:
        return None

    hook.__module__ = "transformers.modeling_utils"
    model.embedding.register_forward_hook(hook)
    assert call(model)[1] is not None
    handle = model.embedding.register_forward_hook(lambda *_: None)
    assert [call(model)[1] for _ in range(3)] == [None] * 3
    handle.remove()
    assert call(model)[1] is not None


def test_what_cannot_be_bound_is_not_tried_at_every_call(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    original = eligibility._bind
    monkeypatch.setattr(eligibility, "_bind", lambda root: tried.append(root) or original(root))
    handle = model.embedding.register_forward_hook(lambda *_: None)
    assert [call(model)[1] for _ in range(3)] == [None] * 3
    assert len(tried) == 1
    handle.remove()
    assert call(model)[1] is not None


def test_replicas_of_data_parallel_decide_for_themselves(model: nn.Module) -> None:
    call(model)
    replica = model._replicate_for_data_parallel()
    assert call(replica) == (None, None)


def test_a_copy_is_bound_to_its_own_weights(model: nn.Module) -> None:
    call(model)
    duplicate = copy.deepcopy(model)
    facts, _ = call(duplicate)
    assert facts[0] is duplicate.layers[0].weight
    assert call(model)[0][0] is model.layers[0].weight


def test_a_second_patch_binds_what_it_serves(model: nn.Module) -> None:
    call(model)
    model.layers.append(Scaling())
    slothplug.patch(model)
    call(model)
    assert [facts for facts, _ in SEEN] == [(layer.weight, 2.0) for layer in model.layers]


def test_a_deleted_model_is_gone_without_the_cycle_collector(model: nn.Module) -> None:
    duplicate = copy.deepcopy(model)
    call(duplicate)
    SEEN.clear()
    weights = [weakref.ref(parameter) for parameter in duplicate.parameters()]
    gc.collect()
    gc.disable()
    try:
        del duplicate
        assert all(reference() is None for reference in weights)
    finally:
        gc.enable()


def test_a_replaced_layer_is_kept_no_longer_than_to_the_next_calls(model: nn.Module) -> None:
    call(model)
    old = weakref.ref(model.layers[1])
    model.layers[1] = Scaling()
    call(model)
    assert old() is None
    assert STATE not in model.layers[1].__dict__


def test_replaced_weights_are_gone_where_nothing_can_be_bound_any_more(model: nn.Module) -> None:
    call(model)
    SEEN.clear()
    old = weakref.ref(model.layers[1].weight)
    model.embedding.register_forward_hook(lambda *_: None)
    model.layers[1].weight = nn.Parameter(torch.ones(4))
    call(model)
    assert old() is None
