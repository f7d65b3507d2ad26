"""A tiny Llama with a byte-level tokenizer, and rows for SFT and DPO, as files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "quick", "brown", "sloth", "plugs", "fused", "kernels", "into", "every", "trainer", "and", "sleeps"]


def write(folder: Path) -> None:
    """``model/``, ``sft.jsonl`` and ``dpo.jsonl`` in ``folder``."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")

    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 16))) for _ in range(144)]
    sft = [{"instruction": sentences[row], "input": "", "output": sentences[row + 48]} for row in range(48)]
    dpo = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(*[iter(sentences)] * 3, strict=True)]
    for name, rows in (("sft", sft), ("dpo", dpo)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
