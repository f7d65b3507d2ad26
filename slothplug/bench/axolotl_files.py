"""The files of a benchmark of Axolotl, made without a network: a model with random weights, its tokenizer, rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slothplug.bench.steps import random_model

MEASURED = "measured.json"
"""What a run leaves in its output folder."""


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """A causal LM of this configuration, as ``random_model`` draws it, and its tokenizer.

    On a disk and not drawn anew in each run, since Axolotl quantizes only weights that it loads, and so that all runs
    have the same. The tokenizer knows nothing but the special tokens.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = random_model({**shape, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    model.save_pretrained(folder, max_shard_size="4GB")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = Tokenizer(models.WordLevel({token: at for at, token in enumerate(special.values())}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write_rows(path: Path, rows: int, length: int, vocab_size: int) -> None:
    """``rows`` rows of ``length`` random tokens, tokenized already, with every label kept."""
    import torch

    tokens = torch.randint(4, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * length, "labels": row}) for row in tokens]
    path.write_text("\n".join(lines) + "\n")
