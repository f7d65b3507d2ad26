"""What the benchmarks of a training step share: shapes of known models, cases, and the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slothplug.bench.environment import markdown, spread

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "gemma2-2b": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration of a training step."""

    shape: str
    adapter: str
    """``lora``, or ``qlora``: 4-bit weights."""
    batch: int
    length: int
    checkpointing: bool
    rank: int = 16
    """LoRA rank on all linears; 0 trains every weight."""
    layers: int = 0
    """Decoder layers; 0 takes the shape's own number."""

    @property
    def model(self) -> dict[str, Any]:
        chosen = dict(SHAPES[self.shape])
        return chosen | {"num_hidden_layers": self.layers} if self.layers else chosen


def random_model(shape: Mapping[str, Any]) -> Any:
    """A causal LM of this configuration with random weights of one seed: in bfloat16 on the GPU where there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, use_cache=False)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: time, memory and losses of each variant, beside those of stock in the same case."""
    columns = (
        "shape", "tokens", "adapter", "checkpointing", "variant", "step, ms (min-max)", "of stock", "peak, GiB",
        "of stock", "loss, first and last step", "furthest from stock",
    )  # fmt: skip
    stock = {_steps_of(r): r for r in results if r["variant"] == "stock" and "error" not in r}
    return markdown(columns, (_row(result, stock.get(_steps_of(result))) for result in results))


def _steps_of(result: Mapping[str, Any]) -> tuple[str, int]:
    """What runs must have in common to be compared."""
    return json.dumps(result["case"]), len(result.get("losses", ()))


def _row(result: Mapping[str, Any], stock: Mapping[str, Any] | None) -> list[str]:
    case = Case(**result["case"])
    adapter = f"{case.adapter} r{case.rank}" if case.rank else "full"
    checkpointing = "on" if case.checkpointing else "off"
    what = [case.shape, f"{case.batch} x {case.length}", adapter, checkpointing, result["variant"]]
    if "error" in result:
        return [*what, "failed", *[""] * 5]
    seconds, peak, losses = result["seconds"], result["peak_bytes"], result["losses"]
    slower, larger, further = "", "", ""
    if stock:
        slower = f"{statistics.median(seconds) / statistics.median(stock['seconds']):.3f}"
        larger = f"{peak / stock['peak_bytes']:.3f}"
        further = f"{max(abs(a - b) for a, b in zip(losses, stock['losses'], strict=True)):.1e}"
    step = spread([second * 1e3 for second in seconds], digits=1)
    return [*what, step, slower, f"{peak / 2**30:.2f}", larger, f"{losses[0]:.4f}, {losses[-1]:.4f}", further]
