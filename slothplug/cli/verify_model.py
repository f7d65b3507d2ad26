"""What ``slothplug verify`` compares: the model a user names, built or loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slothplug.errors import SlothplugError
from slothplug.versions import PEFT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A model type alone says nothing about size: these values, where its config has the name, make it small.
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The command's arguments; see ``slothplug verify --help``."""

    target: str
    layers: int | None = None
    lora: int = 0
    dtype: str = "float32"
    device: str | None = None
    draws: int = 16
    tokens: int = 48


def model_of(request: Request) -> nn.Module:
    """The model in train mode, on the request's device and in its dtype, with adapters if asked for.

    Raises:
        SlothplugError: the target, the dtype or the device is not there, or transformers cannot build the model.
    """
    if request.dtype not in DTYPES:
        raise SlothplugError(f"--dtype {request.dtype} is not one of {', '.join(DTYPES)}.")
    device = _device(request.device)
    torch.manual_seed(0)
    folder = Path(request.target)
    if folder.is_dir() and _has_weights(folder):
        if request.layers:
            raise SlothplugError(
                "--layers builds random weights: point verify at a config.json, not at a trained model."
            )
        model = _load(folder)
    else:
        model = _build(_config_of(request.target), request.layers)
    model.to(device, DTYPES[request.dtype])
    return (_with_lora(model, request.lora) if request.lora else model).train()


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise SlothplugError(f"--device {name} is no device. Use cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SlothplugError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs here.")
    return device


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _load(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers raises about a folder, the user can read
        raise SlothplugError(f"transformers could not load {folder}: {error}") from error
    return model


def _config_of(target: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(target) / "config.json" if Path(target).is_dir() else Path(target)
    if path.is_file():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return AutoConfig.for_model(**values)
        except Exception as error:  # not JSON, no model_type, or values that the config class refuses
            raise SlothplugError(f"{path} is not a model's config: {error}") from error
    if target in CONFIG_MAPPING:
        known = vars(AutoConfig.for_model(target))
        return AutoConfig.for_model(target, **{key: value for key, value in TINY.items() if key in known})
    raise SlothplugError(
        f"'{target}' is neither a folder with a config.json, nor a config file, nor a model type that transformers "
        f"knows. A model of the Hub has to be downloaded first."
    )


def _build(config: Any, layers: int | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if layers:
        config.num_hidden_layers = layers
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = (config.layer_types * layers)[:layers]
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # many configs of transformers do not build at arbitrary sizes
        raise SlothplugError(f"transformers could not build a '{config.model_type}' model: {error}") from error
    _randomise(model)
    return model


def _randomise(model: nn.Module) -> None:
    """Weights at which every term of the mathematics shows: fresh models have norms of exactly 1 and biases of 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise SlothplugError(f"--lora needs PEFT. Install with: {PEFT.install}") from None
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)  # at zero, as PEFT leaves it, no A has a gradient
    return adapted
