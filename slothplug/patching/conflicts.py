"""Recognises a model that another project's kernels already changed: two patches are never stacked."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType

from torch import nn

from slothplug.hookspecs import hookimpl
from slothplug.patching.private_class import stock_class
from slothplug.plugins import operations
from slothplug.settings import Settings

_PROJECTS = {
    "liger_kernel": ("Liger", "use_liger_kernel / enable_liger_kernel / liger_* keys"),
    "unsloth": ("Unsloth", "use_unsloth and the import of unsloth"),
    "unsloth_zoo": ("Unsloth", "use_unsloth and the import of unsloth_zoo"),
    "axolotl": ("Axolotl's kernels", "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel and tiled_mlp"),
    "cut_cross_entropy": ("Cut Cross-Entropy", "cut_cross_entropy"),
}

_HARMLESS = "liger_kernel.transformers.layer_norm"
"""A replacement for which slothplug has no operation."""


@hookimpl
def slothplug_conflicts(model: nn.Module, settings: Settings) -> Iterator[str]:
    seen: set[str] = set()
    for name, module in model.named_modules():
        for where in _origins(module):
            project, switch = _PROJECTS.get(where.partition(".")[0], ("", ""))
            if project and project not in seen and _competes(where, settings):
                seen.add(project)
                yield (
                    f"{project} already changed '{name or type(module).__name__}' ({where}). Load the model without it "
                    f"({switch}), or leave use_fast_kernels off."
                )


def _competes(where: str, settings: Settings) -> bool:
    """Whether a change from Python module ``where`` does what slothplug was asked to do.

    A replacement that operations name as a competitor conflicts only if one of these operations is wanted. Every other
    replacement conflicts.
    """
    competing = [operation.name for operation in operations() if _is_below(where, operation.competitors)]
    return any(map(settings.wants, competing)) if competing else not _is_below(where, (_HARMLESS,))


def _is_below(where: str, prefixes: tuple[str, ...]) -> bool:
    return any(where == prefix or where.startswith(f"{prefix}.") for prefix in prefixes)


def _origins(module: nn.Module) -> Iterator[str]:
    """The Python modules that a module's forward, and functions set on the instance, come from."""
    base = stock_class(module)
    yield base.__module__
    yield getattr(base.forward, "__module__", None) or ""
    for value in module.__dict__.values():
        if isinstance(value, (FunctionType, MethodType)):
            yield value.__module__ or ""
