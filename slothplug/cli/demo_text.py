"""The demo's text: the Python standard library's sources, in tokens of a BPE that is trained on them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from slothplug.errors import SlothplugError

END = "<|end|>"
"""Special token between two files."""

TRAINING_BYTES = 4_000_000
"""As much text as the tokenizer is trained on: a second or two."""


def sources() -> Iterator[str]:
    """The standard library's modules in a fixed order, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idlelib"} & set(parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def blocks_of_tokens(count: int, length: int, vocab: int) -> torch.Tensor:
    """``count`` rows of ``length`` tokens of source text, int64; a byte-level BPE of at most ``vocab`` tokens.

    Raises:
        SlothplugError: Python was installed without its sources.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = list(sources())
    if not texts:
        raise SlothplugError(
            f"The demo trains on the standard library's sources, and {sysconfig.get_path('stdlib')} has none. Use a "
            f"Python that was installed with its sources."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_BYTES), trainer)
    tokens: list[int] = []
    while len(tokens) < count * length:
        for text in texts:
            tokens += tokenizer.encode(text + END).ids
            if len(tokens) >= count * length:
                break
    return torch.tensor(tokens[: count * length]).view(count, length)


def _first(texts: list[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        yield text
        size -= len(text)
