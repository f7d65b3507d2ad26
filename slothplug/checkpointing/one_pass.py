"""torch's reentrant checkpoint, replaced by the one that is not reentrant.

Both keep a layer's arguments and run it again in the backward, from the same state of the random generators. The
reentrant one runs all of it. The other one ends with the last tensor that the layer's nodes have saved, so that
products whose results only the next layer reads are not made again (``kernels.early_saving``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from slothplug.patching.predicates import plain
from slothplug.patching.sites import Refusal

_SAME_RESULT = {"use_reentrant", "preserve_rng_state", "early_stop", "determinism_check"}
"""Arguments of ``torch.utils.checkpoint.checkpoint`` that both kinds take, and that change no result."""


class OnePass(partial):
    """``checkpoint`` that is not reentrant, as a ``partial`` of it, made from a reentrant one.

    Attributes:
        given: the reentrant one. It answers calls where somebody has chosen where its arguments lie: under hooks on
            saved tensors, which do not see those of the other kind in every release of torch, and where torch's class
            has been replaced, as Axolotl's offload of hidden states does.
    """

    given: partial[Any]

    def __call__(self, function: Any, /, *args: Any) -> Any:
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if has_hooks or torch_checkpoint.CheckpointFunction.__module__ != torch_checkpoint.__name__:
            return self.given(function, *args)
        return super().__call__(function, *args)


def in_one_pass(given: Any) -> OnePass | None:
    """What takes the place of ``given``; None where that is not torch's reentrant checkpoint, or has more options."""
    if type(given) is not partial or given.func is not checkpoint or given.args:
        return None
    options = given.keywords
    if options.get("use_reentrant") is not True or not options.keys() <= _SAME_RESULT:
        return None
    ours = OnePass(checkpoint, **{**options, "use_reentrant": False})
    ours.given = given
    return ours


def why_not_cut_short(module: nn.Module) -> Refusal | None:
    """Why the module must be run to its end in the recompute: what its hooks do there would be left out."""
    for name, part in module.named_modules():
        if "_hf_hook" in part.__dict__:
            return Refusal(f"accelerate moves the weights of {name or 'the module'} before and after its call")
        for tensor in part._parameters.values():
            if tensor is not None and (hasattr(tensor, "ds_id") or not (plain(tensor) or _is_quantised(tensor))):
                return Refusal(f"weights of {name or 'the module'} are sharded, or a {type(tensor).__name__}")
    return None


def _is_quantised(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.startswith("bitsandbytes.")
