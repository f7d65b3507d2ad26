"""Tiny models, and what a model is made of, for comparison before and after."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.device import DEVICE


def on_device() -> Any:
    """Tensors that name no device are made on the GPU; on a CPU no mode is entered, as none is for a user."""
    return torch.device(DEVICE) if DEVICE != "cpu" else nullcontext()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The inputs that a file of tests makes once, where its models will be."""
    with on_device():
        return (yield)


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with on_device():
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """What patches models must do so on every supported set of versions."""
    if not item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.core)


@pytest.fixture
def tiny_llama() -> Callable[..., nn.Module]:
    """Makes small random Llama models; keyword arguments go to the configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 0, **changes: object) -> nn.Module:
        torch.manual_seed(seed)
        config = LlamaConfig(
            **{
                "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, **changes,
            }
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return make


@pytest.fixture(params=["full", "lora"])
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    """Makes the model of ``full_and_lora``, trained whole or by adapters."""
    from tests.patching.full_and_lora import full, lora

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return {"full": full, "lora": lora}[request.param]()

    return seeded


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
