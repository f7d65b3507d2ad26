"""Undo, copies, pickles and memory of recordings."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import slothplug
from slothplug.patching.private_class import is_patched
from slothplug.patching.served import STATE, Served
from tests.graphs.steps import OFF, ON, q, replays, state_of, step, train, twins
from tests.patching.device import DEVICE
from tests.patching.lora_models import LAYERS, model


class TestLifecycle:
    def test_undo(self) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        report.undo()
        assert not any(is_patched(part) for part in graphed.modules())

    def test_of_a_with_block(self) -> None:
        one = model().to(DEVICE)
        with slothplug.fast_kernels(one, ON):
            for _ in range(4):
                step(one)
        assert not any(is_patched(part) for part in one.modules())

    def test_a_copy_records_for_itself(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        duplicate = copy.deepcopy(graphed)
        train(duplicate, graphed, 5)
        assert replays(duplicate) == 3 * LAYERS

    def test_a_pickle_holds_nothing_of_it(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        assert not any(is_patched(part) for part in pickle.loads(pickle.dumps(graphed)).modules())

    def test_a_deleted_models_memory_goes_with_its_last_reference(self) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        weight = weakref.ref(q(graphed).base_layer.weight)
        held = weakref.ref(state_of(graphed))
        gc.collect()
        gc.disable()
        try:
            del graphed
            assert weight() is None
            assert held() is None
        finally:
            gc.enable()
        assert "graphs" not in str(report)

    def test_patching_twice_changes_nothing(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        before = replays(graphed)
        again = slothplug.patch(graphed, ON)
        train(graphed, eager, 4)
        assert replays(graphed) > before
        assert f"graphs: {LAYERS} layers recorded for 1 shape," in str(again)

    def test_off(self) -> None:
        one = model().to(DEVICE)
        report = slothplug.patch(one, OFF)
        assert not any(isinstance(s := p.__dict__.get(STATE), Served) and s.op == "graphs" for p in one.modules())
        assert "graphs" not in str(report)
