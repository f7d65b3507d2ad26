"""Whole models on the Triton kernels (interpreted where there is no GPU), patched as a user patches them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.kernels.backend import _triton_primitives, why_not_triton
from slothplug.patching import verdicts
from tests.patching.architectures import assert_same_step, step, tiny
from tests.patching.test_four_bit import qlora


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    if reason := why_not_triton(torch.device("cpu")):
        pytest.skip(reason)


def pair(
    *ops: str, architecture: str = "llama", verify: bool = False, **changes: Any
) -> tuple[nn.Module, nn.Module, slothplug.Report]:
    """A model with ``ops`` on Triton and a stock one. Probes are for other tests: interpreted, they take seconds."""
    sizes = {"num_hidden_layers": 1, **changes}
    model, stock = tiny(architecture, **sizes), tiny(architecture, **sizes)
    report = slothplug.patch(model, {"backend": "triton", "ops": list(ops), "verify": verify})
    assert {site.backend for site in report.fused} == {"triton"}
    return model, stock, report


def assert_trains_as_stock(model: nn.Module, stock: nn.Module, report: slothplug.Report, **inputs: Any) -> None:
    assert_same_step(step(model, **inputs), step(stock, **inputs))
    assert not report.left
    for site in report.fused:
        assert site.calls.served, site.name
        assert not site.calls.fallbacks, site.name


@pytest.mark.parametrize(
    "vocabulary", [65537, *(pytest.param(size, marks=pytest.mark.slow) for size in (257, 65536, 151936))]
)
def test_vocabularies_beyond_one_block(vocabulary: int) -> None:
    """https://github.com/unslothai/unsloth/issues/19: rows longer than 65536 lanes were refused."""
    model, stock, report = pair("head", vocab_size=vocabulary)
    assert_trains_as_stock(model, stock, report)


@pytest.mark.parametrize("hidden", [80, *(pytest.param(size, marks=pytest.mark.slow) for size in (20, 328))])
def test_hidden_sizes_that_fill_no_block(hidden: int) -> None:
    """https://github.com/unslothai/unsloth/issues/19: sizes had to be multiples of a block."""
    model, stock, report = pair("rms_norm", "glu", hidden_size=hidden, intermediate_size=hidden + 1)
    assert_trains_as_stock(model, stock, report)


@pytest.mark.parametrize(
    ("architecture", "head_dim", "factor"),
    [
        ("stablelm", 80, 0.25),
        pytest.param("gpt_neox", 128, 0.25, marks=pytest.mark.slow),
        pytest.param("llama", 96, 1.0, marks=pytest.mark.slow),
    ],
)
def test_partial_rotation_far_from_position_0(architecture: str, head_dim: int, factor: float) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/1451: wrong pairs are invisible at position 0 and grow with it."""
    changes = {"hidden_size": 4 * head_dim, "head_dim": head_dim} if architecture != "llama" else {"head_dim": head_dim}
    factors = {"rotary_pct": factor} if architecture == "gpt_neox" else {"partial_rotary_factor": factor}
    model, stock, _ = pair("rotary", architecture=architecture, **changes, **(factors if factor != 1.0 else {}))
    positions = torch.arange(181, 201).expand(2, 20)
    assert_same_step(step(model, position_ids=positions), step(stock, position_ids=positions))


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "phi3"])
def test_positions_of_each_row(architecture: str) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/477: tables with a batch dimension were read as if shared."""
    model, stock, report = pair("rotary", architecture=architecture)
    # A mask, so that transformers takes no jump for the border of a packed sample; and unequal distances, since
    # attention does not see where a row begins.
    positions = torch.stack([torch.arange(100, 120), torch.arange(0, 60, 3)])
    mask = torch.ones_like(positions)
    assert_trains_as_stock(model, stock, report, position_ids=positions, attention_mask=mask)


def test_a_kernel_that_cannot_be_imported_leaves_its_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/triton-lang/triton/issues/4938: a helper that moved between releases failed at first use."""
    monkeypatch.setattr(verdicts, "_verdicts", {})
    monkeypatch.setitem(sys.modules, "slothplug.kernels.triton.rms_norm", None)
    _triton_primitives.cache_clear()
    model, stock, report = pair("rms_norm", "glu", verify=True)
    reasons = {site.reason for site in report.left}
    assert {site.op for site in report.left} == {"rms_norm"}
    assert all("its probe failed: ModuleNotFoundError" in reason for reason in reasons), reasons
    assert_same_step(step(model), step(stock))


def test_four_bit_weights_are_unpacked_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, stock = qlora(), qlora()
    report = slothplug.patch(model, {"backend": "triton", "ops": ["lora"]})
    with monkeypatch.context() as patched:
        patched.setattr(bitsandbytes.functional, "dequantize_4bit", None)
        ours = step(model)
    assert_same_step(ours, step(stock))
    assert {site.calls.served for site in report.fused} == {1}
