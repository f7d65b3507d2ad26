"""What the demo trains, and on what: one plan for both runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """One fine-tuning run, without the answer to "stock or fast"."""

    device: str
    dtype: str
    """dtype of the frozen weights; "bfloat16" trains under bf16 autocast."""
    model: dict[str, Any]
    """Arguments of ``LlamaConfig``, apart from ``vocab_size``."""
    model_vocab: int
    tokenizer_vocab: int
    """Tokens that the tokenizer is trained to, at most ``model_vocab``."""
    rows: int
    tokens: int
    steps: int
    learning_rate: float
    warmup_steps: int = 5
    rank: int = 16
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Rows of text that the run reads; one more batch is set aside for the comparison of gradients."""
        return self.rows * (self.steps + 1)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


# Small enough for two cores and three minutes, both runs together.
CPU = Plan(
    device="cpu",
    dtype="float32",
    model={
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 256,
    },
    model_vocab=4096,
    tokenizer_vocab=4096,
    rows=4,
    tokens=256,
    steps=60,
    learning_rate=5e-3,
)  # fmt: skip

# The shape of Llama-3.2-1B: its 128k vocabulary makes the head most of stock's activation memory.
GPU = Plan(
    device="cuda",
    dtype="bfloat16",
    model={
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    model_vocab=128256,
    tokenizer_vocab=32768,
    rows=4,
    tokens=2048,
    steps=40,
    learning_rate=1e-3,
)  # fmt: skip

# Stock needs about 50 GiB for the plan above; a smaller GPU takes fewer rows.
ROOM_FOR_FOUR_ROWS = 64 * GIB
ROOM_FOR_ONE_ROW = 20 * GIB


def choose_plan(steps: int | None, cpu: bool) -> Plan:
    """The plan for this machine: a 1B shape on a GPU with room for it, else the small one."""
    plan = CPU
    if not cpu and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        if free >= ROOM_FOR_FOUR_ROWS:
            plan = GPU
        elif free >= ROOM_FOR_ONE_ROW:
            plan = replace(GPU, rows=1)
        else:
            plan = replace(CPU, device="cuda")
    return replace(plan, steps=steps) if steps else plan
