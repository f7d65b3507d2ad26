"""A small random model of any causal LM type that the installed transformers knows, made from its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_PARAMETERS = 60_000_000

SMALL: Mapping[str, Any] = {
    # tokens
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    # widths
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim_model": 64, "embed_dim": 64, "embedding_size": 64,
    "word_embed_proj_dim": 64, "attention_hidden_size": 64, "lru_width": 64, "hidden_size_per_layer_input": 16,
    "intermediate_size": 128, "ffn_dim": 128, "n_inner": 128, "d_ff": 128, "dim_ff": 128, "ffn_hidden_size": 128,
    "ffn_embed_dim": 128, "mlp_hidden_size": 128, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128,
    # depth
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 1,
    "num_kv_shared_layers": 0, "first_k_dense_replace": 1,
    # attention
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 16,
    "dim_head": 16, "global_head_dim": 16, "rotary_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32,
    "attention_window_size": 32, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 16,
    # experts
    "moe_intermediate_size": 32, "moe_intermediate_dim": 32, "shared_expert_intermediate_size": 32,
    "expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    # state-space and linear attention
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "state_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "chunk_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "altup_num_inputs": 2, "laurel_rank": 8,
}  # fmt: skip
"""Field of a configuration: the small value that it gets where the configuration has the field."""

# Where None means "do not use", a number would switch a feature on.
KEEP_NONE = {"n_inner", "q_lora_rank", "sliding_window", "intermediate_size"}

# Lists with one entry a layer: the small model gets each kind of layer once.
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "no_rope_layers",
    "moe_layers",
)

RETRIES: tuple[Mapping[str, Any], ...] = (
    {}, {"head_dim": 16}, {"layer_types": None}, {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "layer_types": None}, {"num_hidden_layers": 8},
)  # fmt: skip


def causal_lm_types() -> list[str]:
    """Every model type that ``AutoModelForCausalLM`` knows here."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str, seed: int = 0) -> nn.Module:
    """A float32 model of ``model_type`` with random weights of a size that keeps gradients well away from zero.

    Raises:
        Exception: whatever the last attempt raised, where no small configuration of the type can be built.
    """
    torch.manual_seed(seed)
    error: Exception | None = None
    dropped: set[str] = set()
    for attempt in _attempts(model_type, dropped):
        try:
            model = AutoModelForCausalLM.from_config(attempt()).float()
        except Exception as failure:
            error = failure
            if read_only := re.search(r"property '(\w+)' of", str(failure)):
                dropped.add(read_only.group(1))
            continue
        if sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
            raise MemoryError(f"the smallest {model_type} that could be configured is too large")
        _randomise(model)
        return model
    raise error or RuntimeError(f"no configuration of {model_type} was tried")


def _attempts(model_type: str, dropped: set[str]) -> Iterator[Any]:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    for changes in (*RETRIES, *RETRIES):
        yield lambda changes=changes: config_class(**_small_fields(default, changes, dropped))
    text = getattr(default, "text_config", None)
    if text is not None:
        yield lambda: config_class(text_config=type(text)(**_small_fields(text, {}, dropped)).to_dict())


def _small_fields(default: Any, changes: Mapping[str, Any], dropped: set[str]) -> dict[str, Any]:
    """Keyword arguments that make ``default`` small."""
    fields = {
        name: value
        for name, value in SMALL.items()
        if _writable(default, name) and not (name in KEEP_NONE and _value(default, name) is None)
    }
    for name in PER_LAYER:
        kinds = _value(default, name)
        if isinstance(kinds, (list, tuple)) and kinds and _writable(default, name):
            fields["num_hidden_layers"] = max(fields.get("num_hidden_layers", 2), len(dict.fromkeys(kinds)))
    for name in PER_LAYER:
        kinds = _value(default, name)
        if isinstance(kinds, (list, tuple)) and kinds and _writable(default, name):
            distinct, depth = list(dict.fromkeys(kinds)), fields["num_hidden_layers"]
            fields[name] = (distinct * depth)[:depth]
    if hasattr(default, "kv_lora_rank") and hasattr(default, "head_dim"):
        fields["head_dim"] = 8  # of latent attention: the rotary part
    fields.update(changes)
    return {name: value for name, value in fields.items() if name not in dropped}


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a property of the configuration that needs other fields first
        return None


def _writable(config: Any, name: str) -> bool:
    member = getattr(type(config), name, None)
    if isinstance(member, property) and member.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # a property that raises exists
        return True


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.15)
