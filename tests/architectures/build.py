"""A small random model of any causal LM type that the installed transformers knows, made from its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_PARAMETERS = 60_000_000

SMALL: Mapping[str, Any] = {
    # tokens
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    # widths
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim_model": 64, "embed_dim": 64, "embedding_size": 64,
    "word_embed_proj_dim": 64, "adapter_in_dim": 64, "adapter_input_size": 64,
    "adapter_out_dim": 64, "attention_hidden_size": 64, "lru_width": 64, "hidden_size_per_layer_input": 16,
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

LATENT = {"head_dim": 8, "num_key_value_heads": 4}

# Where None means "do not use", a number would switch a feature on.
KEEP_NONE = {"n_inner", "q_lora_rank", "sliding_window", "intermediate_size"}

# Lists with one entry a layer: the small model gets each kind of layer once.
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "no_rope_layers",
)

RETRIES: tuple[Mapping[str, Any], ...] = (
    {}, {"head_dim": 16}, {"layer_types": None}, {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "layer_types": None}, {"num_hidden_layers": 8},
)  # fmt: skip
"""Tried in turn on the small fields."""

OMIT = object()
"""In place of a value: the type does not take the field."""

ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"num_hidden_layers": OMIT, "num_decoder_layers": 2, "num_encoder_layers": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # Training reseeds the generator from the system's entropy: no two steps would have one dropout or one hash.
    "reformer": {
        "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0,
        "hash_seed": 1, "is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 4),
    },
    "xlnet": {"max_position_embeddings": OMIT},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **ZAMBA},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **ZAMBA},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Fields that a type needs beside the small ones."""


def causal_lm_types() -> list[str]:
    """The model types that ``AutoModelForCausalLM`` knows here; of those that share a model class, the first."""
    by_class: dict[Any, str] = {}
    for model_type, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        by_class.setdefault(model_class, model_type)
    return sorted(by_class.values())


def tiny_model(model_type: str, seed: int = 0, **fields: Any) -> nn.Module:
    """A float32 model of ``model_type`` with random weights of a size that keeps gradients well away from zero.

    ``fields`` are values for its configuration, before the small ones.

    Raises:
        Exception: whatever the first attempt raised, where no small configuration of the type can be built.
    """
    errors: list[Exception] = []
    dropped: set[str] = set()
    for changes in (*RETRIES, *RETRIES):
        try:
            return _build(
                _small_config(model_type, {**changes, **SPECIAL.get(model_type, {}), **fields}, dropped), seed
            )
        except Exception as failure:
            errors.append(failure)
            if read_only := re.search(r"property '(\w+)' of", str(failure)):
                dropped.add(read_only.group(1))
    raise errors[0]


def _build(config: PretrainedConfig, seed: int) -> nn.Module:
    """A model of ``config``, after one without storage has shown that it is small."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise MemoryError(f"the smallest {config.model_type} that could be configured has {size} parameters")
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config).float()
    _randomise(model)
    return model


def _small_config(model_type: str, changes: Mapping[str, Any], dropped: set[str]) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_small_fields(config_class(), changes, dropped))


def _small_fields(default: PretrainedConfig, changes: Mapping[str, Any], dropped: set[str]) -> dict[str, Any]:
    """Keyword arguments that make ``default``, and the configurations in it, small."""
    fields: dict[str, Any] = {name: value for name, value in SMALL.items() if _takes(default, name)}
    fields |= _per_layer(default, fields.get("num_hidden_layers", 2))
    if "kv_lora_rank" in fields:  # latent attention: as many keys as queries, and head_dim is the rotary part
        fields |= {name: value for name, value in LATENT.items() if name in fields}
    fields |= changes
    for name, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            fields[name] = type(part)(**_small_fields(part, changes, dropped)).to_dict()
    return {name: value for name, value in fields.items() if name not in dropped and value is not OMIT}


def _per_layer(default: PretrainedConfig, depth: int) -> dict[str, Any]:
    """The lists with an entry a layer, shortened to a depth at which each kind of layer is there."""
    lists = {name: value for name in PER_LAYER if (value := _list(default, name))}
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items()}
    depth = max([depth, *map(len, kinds.values())])
    shortened: dict[str, Any] = {name: (distinct * depth)[:depth] for name, distinct in kinds.items()}
    return {**shortened, "num_hidden_layers": depth} if shortened else {}


def _list(config: PretrainedConfig, name: str) -> list[Any]:
    value = _value(config, name)
    own = name not in type(config).attribute_map and _writable(config, name)
    return list(value) if own and isinstance(value, (list, tuple)) else []


def _takes(config: PretrainedConfig, name: str) -> bool:
    return _writable(config, name) and not (name in KEEP_NONE and _value(config, name) is None)


def _value(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a property of the configuration that needs other fields first
        return None


def _writable(config: PretrainedConfig, name: str) -> bool:
    member = getattr(type(config), type(config).attribute_map.get(name, name), None)
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
