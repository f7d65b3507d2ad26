"""Whether a model may be patched at all, with these settings and these packages; asked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slothplug.errors import ConflictError, SettingsError, UnsupportedModelError, UnsupportedVersionError
from slothplug.kernels.backend import why_not_triton
from slothplug.patching.forward_context import Outermost
from slothplug.patching.model_context import ModelContext
from slothplug.patching.served import Served
from slothplug.plugins import plugin_manager
from slothplug.settings import Settings
from slothplug.versions import loaded_for


def context_of(earlier: Mapping[nn.Module, Served[Any, Any] | Outermost], settings: Settings) -> ModelContext:
    """The context of an earlier patch of the model, or a new one.

    Raises:
        ConflictError: the earlier patch has other settings.
    """
    context = next((state.context for state in earlier.values()), None)
    if context is None:
        return ModelContext(settings)
    if context.settings != settings:
        theirs, ours = (one.model_dump(exclude_defaults=True) or True for one in (context.settings, settings))
        raise ConflictError(
            f"The model is patched with use_fast_kernels: {theirs}, and now {ours} is asked for. Say the same in both "
            f"places, or call slothplug.unpatch(model) first. The model was not changed."
        )
    return context


def home(core: nn.Module) -> torch.device:
    """The device of the model's first weight that is loaded; ``cpu`` where none is."""
    return next((weight.device for weight in core.parameters() if not weight.is_meta), torch.device("cpu"))


def judge_versions(model: nn.Module) -> Iterator[str]:
    """Raises where a package is too old; yields a note for each that is newer than what was tested."""
    for package, version in loaded_for(model):
        age = package.age(version)
        if age == "too old":
            raise UnsupportedVersionError(
                f"The model was not patched: {package.name} {version} is older than {package.lowest}, the oldest that "
                f"slothplug supports. Install with: {package.install}"
            )
        if age == "untested":
            yield (
                f"{package.name} {version} is newer than {package.newest}, the newest that slothplug was tested with; "
                f"what could not be proved equal was left"
            )


def refuse_model(core: nn.Module, settings: Settings) -> None:
    """Raises where the model must not be patched at all."""
    conflicts = [
        reason for found in plugin_manager().hook.slothplug_conflicts(model=core, settings=settings) for reason in found
    ]
    if conflicts:
        raise ConflictError("The model was not patched. " + " ".join(conflicts))
    parameters = list(core.parameters())
    offloaded = any(hasattr(module, "_hf_hook") for module in core.modules())  # accelerate loads them for each call
    if parameters and all(parameter.is_meta for parameter in parameters) and not offloaded:
        raise UnsupportedModelError(
            "The model was not patched: all its weights are on the 'meta' device, so nothing can be compared on it. "
            "Load the weights (or call model.to_empty and initialise them) before the patch."
        )


def judge_backend(core: nn.Module, settings: Settings) -> Iterator[str]:
    """Raises where Triton was asked for and cannot serve; yields a note where it was not taken by itself."""
    reason = why_not_triton(home(core)) if settings.backend != "torch" else None
    if reason and settings.backend == "triton":
        raise SettingsError(
            f"The model was not patched: use_fast_kernels.backend is 'triton', but {reason}. Mend that, or set it "
            f"to 'auto' (PyTorch where Triton cannot serve) or 'torch'."
        )
    if reason:
        yield f"kernels run on PyTorch: {reason}"
