"""Recognises a model that somebody else's kernels already changed: two patches are never stacked."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType

from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.patching.private_class import stock_class
from slothplug.settings import Settings

_PROJECTS = {
    "liger_kernel": ("Liger", "use_liger_kernel / enable_liger_kernel / liger_* keys"),
    "unsloth": ("Unsloth", "use_unsloth and the import of unsloth"),
    "unsloth_zoo": ("Unsloth", "use_unsloth and the import of unsloth_zoo"),
    "axolotl": ("Axolotl's kernels", "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel and tiled_mlp"),
    "cut_cross_entropy": ("Cut Cross-Entropy", "cut_cross_entropy"),
}

_OPERATIONS = {"rms_norm": "rms_norm", "rope": "rotary", "swiglu": "glu", "geglu": "glu", "model": "head"}
"""What a module inside ``liger_kernel.transformers`` stands in for. Of the others, layer_norm is no operation here."""


@hookimpl
def slothplug_conflicts(model: nn.Module, settings: Settings) -> Iterator[str]:
    seen: set[str] = set()
    for name, module in model.named_modules():
        for where in _homes(module):
            project, switch = _PROJECTS.get(where.partition(".")[0], ("", ""))
            if project and project not in seen and _competes(where, settings):
                seen.add(project)
                yield (
                    f"{project} already changed '{name or type(module).__name__}' ({where}). Load the model without it "
                    f"({switch}), or leave use_fast_kernels off."
                )


def _competes(where: str, settings: Settings) -> bool:
    """Whether a change from Python module ``where`` does what slothplug was asked to do.

    Liger replaces one operation at a time, and may do what is left out here. The others replace more than one.
    """
    project, _, rest = where.partition(".")
    if project == "cut_cross_entropy":
        return settings.wants("head")
    if project != "liger_kernel":
        return True
    part = rest.removeprefix("transformers.").partition(".")[0]
    return part != "layer_norm" and (part not in _OPERATIONS or settings.wants(_OPERATIONS[part]))


def _homes(module: nn.Module) -> Iterator[str]:
    """The Python modules that a module's forward, and functions set on the instance, come from."""
    base = stock_class(module)
    yield base.__module__
    yield getattr(base.forward, "__module__", None) or ""
    for value in module.__dict__.values():
        if isinstance(value, (FunctionType, MethodType)):
            yield value.__module__ or ""
