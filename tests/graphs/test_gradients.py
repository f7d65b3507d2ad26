"""Gradients that leave a recording belong to the caller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.graphs.steps import OTHER, assert_same, move, replays, step, train, twins
from tests.patching.lora_models import IDS, LAYERS, layer


class TestGradients:
    def test_accumulate_over_micro_batches(self) -> None:
        graphed, eager, _ = twins()
        for _ in range(3):
            for micro in range(4):
                assert_same(step(graphed, zero=not micro), step(eager, zero=not micro))
        assert replays(graphed) == 10 * LAYERS

    def test_that_are_kept_or_changed_stay_the_callers(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        step(graphed)
        kept = {name: p.grad for name, p in graphed.named_parameters() if p.grad is not None}
        values = {name: grad.clone() for name, grad in kept.items()}
        graphed.zero_grad()
        torch.nn.utils.clip_grad_norm_(graphed.parameters(), 1e-3)
        step(graphed, IDS.flip(0))
        assert all(torch.equal(kept[name], values[name]) for name in kept)
        for grad in kept.values():
            grad.zero_()
        assert_same(step(graphed), step(eager))

    def test_of_two_backwards_through_one_graph(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            loss = one(input_ids=IDS, labels=IDS).loss
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        assert all(map(torch.equal, *grads))
        train(graphed, eager, 2)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_of_two_forwards_before_a_backward(self, order: tuple[int, int]) -> None:
        graphed, eager, report = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            losses = [one(input_ids=ids, labels=ids).loss for ids in (IDS, OTHER)]
            for index in order:
                losses[index].backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
        assert "the backward of an earlier call is still to come" in str(report)
        train(graphed, eager, 2)

    def test_of_the_recorded_forward_whose_backward_comes_late(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 2)
        grads = []
        for one in (graphed, eager):
            one.zero_grad()
            losses = [one(input_ids=IDS, labels=IDS).loss for _ in range(2)]  # the first is recorded
            losses[1].backward()
            losses[0].backward()
            grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
        train(graphed, eager, 4)

    def test_of_a_part_of_the_model(self) -> None:
        graphed, eager, _ = twins()
        train(graphed, eager, 4)
        grads = []
        for one in (graphed, eager):
            loss = one(input_ids=IDS, labels=IDS).loss
            last = layer(one, f"layers.{LAYERS - 1}.mlp.down_proj").lora_B["default"].weight
            grads.append(torch.autograd.grad(loss, last)[0])
            del loss
        assert torch.equal(*grads)
        train(graphed, eager, 2)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_optimizers_and_clipping_in_place(options: dict[str, bool]) -> None:
    graphed, eager, _ = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-2, **options) for one in (graphed, eager)]
    for _ in range(6):
        assert_same(step(graphed), step(eager))
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (graphed, eager)]
        assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
    assert replays(graphed) == 4 * LAYERS


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_buckets_of_distributed_data_parallel(bucket_view: bool) -> None:
    """Its hooks run when a gradient is accumulated, and copy it into a bucket, of which it may become a part."""
    graphed, eager, _ = twins()
    wrapped = [DistributedDataParallel(one, gradient_as_bucket_view=bucket_view) for one in (graphed, eager)]
    for i in range(6):
        first, second = (step(one, zero=i % 2 == 0) for one in wrapped)  # two micro-batches each
        assert_same(first, second)
        if i % 2:
            move(graphed)
            move(eager)
    with wrapped[0].no_sync(), wrapped[1].no_sync():
        assert_same(*(step(one) for one in wrapped))
    assert replays(graphed) == 5 * LAYERS
