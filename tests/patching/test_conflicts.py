"""A model that somebody else's kernels already changed is recognised and refused, with the switch to turn off."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import MethodType

import pytest
from torch import nn

import slothplug


def test_ligers_patch_is_refused() -> None:
    """In a process of its own: Liger's patch of one instance also replaces classes of the modeling module."""
    pytest.importorskip("liger_kernel")
    script = """
        import slothplug
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        _apply_liger_kernel_to_instance(model=model)
        try:
            slothplug.patch(model)
        except slothplug.ConflictError as error:
            print(error)
        print([type(m).__module__ for m in model.modules() if hasattr(type(m), "_slothplug_base")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    refusal, patched = done.stdout.splitlines()
    assert re.search("Liger already changed .*use_liger_kernel", refusal)
    assert patched == "[]"


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ("unsloth.kernels.rms_layernorm", "Unsloth already changed"),
        ("axolotl.monkeypatch.lora_kernels", "Axolotl's kernels already changed .*lora_mlp_kernel"),
    ],
)
def test_a_forward_bound_on_an_instance_by_a_known_project_is_refused(
    home: str, words: str, tiny_llama: Callable[..., nn.Module]
) -> None:
    """Stands in for the projects' own patches, which need a GPU: they bind a function of theirs as ``mlp.forward``."""

    def forward(self: nn.Module, x: object) -> object:
        return x

    forward.__module__ = home
    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(forward, mlp)
    with pytest.raises(slothplug.ConflictError, match=words):
        slothplug.patch(model)


def test_a_class_of_a_known_project_is_refused(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    namespace = {"__module__": "unsloth.models.llama"}
    model.model.norm.__class__ = type("FastRMSNorm", (type(model.model.norm),), namespace)
    with pytest.raises(slothplug.ConflictError, match=r"Unsloth already changed 'model\.norm'"):
        slothplug.patch(model)


@pytest.mark.parametrize(
    ("home", "op"),
    [
        ("liger_kernel.transformers.rms_norm", "rms_norm"),
        ("liger_kernel.transformers.swiglu", "glu"),
        ("liger_kernel.transformers.model.llama", "head"),
        ("cut_cross_entropy.transformers.llama", "head"),
    ],
)
def test_what_slothplug_was_told_to_leave_may_be_done_by_another(
    home: str, op: str, tiny_llama: Callable[..., nn.Module]
) -> None:
    model = tiny_llama()
    module = {"rms_norm": model.model.norm, "glu": model.model.layers[0].mlp, "head": model}[op]
    stock = type(module)
    module.__class__ = type(stock.__name__, (stock,), {"__module__": home})
    with pytest.raises(slothplug.ConflictError, match=re.escape(home)):
        slothplug.patch(model)
    report = slothplug.patch(model, {"skip_ops": [op]})
    assert {site.op for site in report.fused} == {"rms_norm", "glu", "rotary", "head"} - {op}


def test_ligers_layer_norm_may_stay(tiny_llama: Callable[..., nn.Module]) -> None:
    model = tiny_llama()
    model.model.extra = nn.LayerNorm(8)
    model.model.extra.__class__ = type(
        "LigerLayerNorm", (nn.LayerNorm,), {"__module__": "liger_kernel.transformers.layer_norm"}
    )
    assert slothplug.patch(model).fused
