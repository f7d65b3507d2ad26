"""One row of the architecture table: what slothplug finds and serves in a model type, and whether the numbers stay.

A site counts if the stock step runs it forward and backward: a module that the step never calls, a layer that never
rotates and an indexer to which no gradient comes are no sites. It is served if a counter shows that its fused path ran
forward and backward in the patched step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import slothplug
from slothplug.ops.rotary.forward import rotary_functions
from slothplug.patching.private_class import stock_class
from slothplug.patching.report import Report, SiteReport
from slothplug.patching.unwrap import wrappers_and_core
from tests.architectures.build import tiny_model
from tests.architectures.step import Distance, Reached, distance, round_weights_again, train_step
from tests.backward_calls import count_backward

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
NOISE_FACTOR = 2
"""How far from stock a step may be, in distances of stock from itself after another rounding of the weights, where that
is more than the tolerances."""

QKV = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))
"""Names of three layers in one module that make the queries, keys and values of one attention."""


def survey(model_type: str, backend: str) -> dict[str, Any]:
    """One row of the table, as plain data."""
    torch.set_num_threads(1)
    row: dict[str, Any] = {"type": model_type}
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return {**row, "not_built": brief(error)}
    row["class"] = type(model).__name__
    row["plain"] = _part(model, backend)
    if "not_run" not in row["plain"]:
        row["lora"] = _with_lora(model, model_type, backend)
    return row


def _with_lora(model: nn.Module, model_type: str, backend: str) -> dict[str, Any]:
    """The same with adapters."""
    try:
        adapted = with_adapters(model, model_type)
    except Exception as error:
        return {"not_run": brief(error)}
    return _part(adapted, backend)


def with_adapters(model: nn.Module, model_type: str) -> nn.Module:
    """The model with a LoRA adapter on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = _linear_layers(model, model_type) or "all-linear"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[arg-type]


def _linear_layers(model: Any, model_type: str) -> list[str]:
    """Names of the layers that are ``nn.Linear`` and nothing more: routers and experts derived from it need not return
    what it returns. PEFT refuses two layers of Mamba mixers, whose fused kernels read their weights."""
    mamba = model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and module is not model.get_output_embeddings()
        and not (mamba and name.endswith(".out_proj"))
    ]


def _part(model: nn.Module, backend: str) -> dict[str, Any]:
    """A stock step and a patched one of ``model``."""
    _, core = wrappers_and_core(model)
    try:
        with Reached(_rotary_codes(core)) as reached:
            train_step(model)
        stock = train_step(model)  # the second: BigBird's first step changes its kind of attention
    except Exception as error:
        return {"not_run": brief(error)}
    try:
        report = _patch(model, backend)
        step = train_step(model)
    except Exception as error:
        return {"error": brief(error), "equal": False}
    found = {"ops": _ops(report, core, reached), "qkv": _shared(report, core, reached)}
    slothplug.unpatch(model)
    round_weights_again(model)
    return {**_compared(distance(step, stock), distance(train_step(model), stock)), **found}


def _patch(model: nn.Module, backend: str) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", slothplug.NothingFusedWarning)
        report = slothplug.patch(model, {"backend": backend})
    count_backward(report)
    return report


def _compared(error: Distance, noise: Distance) -> dict[str, Any]:
    """Whether a patched step is stock's, by its distance and that of a stock step whose weights were rounded again."""
    loss_bound = max(LOSS_TOLERANCE, NOISE_FACTOR * noise.loss)
    gradient_bound = max(GRADIENT_TOLERANCE, NOISE_FACTOR * noise.gradient)
    return {
        "equal": error.loss <= loss_bound and error.gradient <= gradient_bound,
        "loss_error": error.loss,
        "gradient_error": error.gradient,
        "loss_noise": noise.loss,
        "gradient_noise": noise.gradient,
    }


def _rotary_codes(core: nn.Module) -> set[CodeType]:
    return {f.__code__ for module in core.modules() for _, f in rotary_functions(stock_class(module).forward)}


def _ops(report: Report, core: nn.Module, reached: Reached) -> dict[str, Any]:
    """For each operation the sites that count, those served, and why the others are not."""
    ops = {}
    for op, sites in report.by_op().items():
        modules = reached.callers if op == "rotary" else reached.modules
        ran = [site for site in sites if core.get_submodule(site.name) in modules]
        counted = [site for site in ran if not site.excused]
        served = [site for site in counted if site.calls.served and site.calls.backward]
        reasons = Counter(reason for site in counted if site not in served for reason in _why(site))
        ops[op] = {
            "sites": len(counted),
            "served": len(served),
            "reasons": dict(reasons),
            "excused": dict(Counter(site.reason for site in ran if site.excused)),
            "not_run": len(sites) - len(ran),
        }
    return ops


def _why(site: SiteReport) -> list[str]:
    if site.status == "left":
        return [f"{site.class_name}: {site.reason}"]
    return [f"{site.class_name}: {reason}" for reason in site.calls.fallbacks or ["no gradient came back"]]


def _shared(report: Report, core: nn.Module, reached: Reached) -> dict[str, Any]:
    """Attentions with layers of their own for q, k and v, and those in which one node computed all three."""
    calls = {site.name: site.calls for site in report.fused if site.op == "lora"}
    found, shared, alone = 0, 0, []
    for name, children in _attentions(core):
        if core.get_submodule(name) not in reached.modules:
            continue
        found += 1
        counts = [calls[child].collected if child in calls else 0 for child in children]
        if sum(count > 0 for count in counts) == 2:
            shared += 1
        else:
            alone.append(f"{type(core.get_submodule(name)).__name__}: {counts}")
    return {"attentions": found, "shared": shared, "alone": sorted(set(alone))}


def _attentions(core: nn.Module) -> Iterator[tuple[str, list[str]]]:
    for name, module in core.named_modules():
        for names in QKV:
            if all(_linear(module._modules.get(child)) for child in names):
                yield name, [f"{name}.{child}" for child in names]


def _linear(module: nn.Module | None) -> bool:
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def brief(error: Exception) -> str:
    """The first line of what an exception says."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
