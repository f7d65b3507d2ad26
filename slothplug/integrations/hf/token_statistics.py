"""Which trainers read entropy and most likely token of every token from the logits after the loss."""

from __future__ import annotations

import inspect

from transformers import Trainer


def reads_token_statistics(trainer: Trainer | None) -> bool:
    """Whether the trainer's loss is TRL's that logs entropy and token accuracy from the logits of every batch.

    ``SFTTrainer`` does from TRL 0.24 on, without ``use_liger_kernel``, until a head of TRL's own returns both. Versions
    are told apart by the function that they call.
    """
    if trainer is None or getattr(trainer.args, "use_liger_kernel", False):
        return False
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("trl.") and "compute_loss" in vars(cls):
            code = getattr(inspect.unwrap(vars(cls)["compute_loss"]), "__code__", None)
            return code is not None and "entropy_from_logits" in code.co_names
    return False
