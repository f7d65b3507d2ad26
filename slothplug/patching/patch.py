"""``patch``: from a model and a flag to a model on fused kernels and a report of what was done."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from slothplug.errors import (
    ConflictError,
    NothingFusedError,
    NothingFusedWarning,
    SettingsError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from slothplug.kernels.backend import why_not_triton
from slothplug.patching.compiled import why_not_compiled
from slothplug.patching.forward_context import Outermost, with_call
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import preserved_rng, stock_modes
from slothplug.patching.predicates import device_of, why_not_touchable
from slothplug.patching.private_class import check_undoable, give_back, is_patched, stock_class, take, with_forward
from slothplug.patching.report import Report, SiteReport
from slothplug.patching.served import STATE, Calls, Served
from slothplug.patching.sites import Kernel, Left, Operation, Refusal, Site
from slothplug.patching.unwrap import wrappers_and_core
from slothplug.plugins import operations, plugin_manager
from slothplug.settings import Settings
from slothplug.versions import loaded_for

logger = logging.getLogger("slothplug")

_verdicts: dict[Hashable, Refusal | None] = {}
"""Outcome of earlier probes: why the site cannot be served, or None where it can."""


def patch(model: nn.Module, settings: bool | Mapping[str, Any] | Settings = True) -> Report:
    """Makes ``model`` run on fused kernels wherever that is proved to be the same computation.

    ``model`` may be a plain model, a PEFT model, or either wrapped by DDP, FSDP, DeepSpeed or ``torch.compile``; it is
    changed in place, and no other model, class or module global is. Patching twice changes nothing the second time,
    except that sites which came since (a new adapter) are served too.

    Args:
        model: the model that is about to be trained.
        settings: ``True``, a mapping of settings, or ``Settings``. ``False`` changes nothing and reports nothing.

    Returns:
        The report; ``report.undo()`` makes the model what it was.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        SettingsError: a setting is not valid, or asks for a backend that cannot serve the model's device.
        ConflictError: the model was already changed by Liger, Unsloth or Axolotl's kernels, or is patched with other
            settings.
        UnsupportedModelError: the model is on ``meta`` and nobody will load its weights.
        UnsupportedVersionError: torch, transformers or PEFT is older than the oldest supported version.
        NothingFusedError: ``strict`` is set and a site was left, or none was found.
    """
    return _patch(model, Settings.from_flag(settings))[0]


def report_left(model: nn.Module, settings: Settings, refusal: Refusal) -> Report:
    """``patch`` for a caller who knows that nothing fused would run: every site is left with ``refusal``.

    The report, the warning and what ``strict`` raises are those of a patch that fused nothing.
    """
    return _patch(model, settings, refusal)[0]


@contextmanager
def fast_kernels(model: nn.Module, settings: bool | Mapping[str, Any] | Settings = True) -> Iterator[Report]:
    """``patch`` for a ``with`` block: when the block ends, also by an exception, the model is what it was.

    Sites that an earlier patch serves stay served.
    """
    report, taken = _patch(model, Settings.from_flag(settings))
    try:
        yield report
    finally:
        check_undoable(taken)
        for module in taken:
            give_back(module)


def _patch(
    model: nn.Module, settings: Settings | None, refusal: Refusal | None = None
) -> tuple[Report, list[nn.Module]]:
    """The report, and the modules that got a private class; none has one if an exception is raised.

    ``refusal`` says why no module is to be served; None where nothing stands against it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"slothplug patches a torch.nn.Module, not a {type(model).__name__}.")
    wrappers, core = wrappers_and_core(model)
    manager = plugin_manager()
    faults_before = len(manager.faults)
    registered = {operation.name: operation for operation in operations()}
    known = list(registered)
    if settings is None:
        return Report(core, Settings(ops=()), known), []
    settings.check_ops(known)
    report = Report(model, settings, known)
    report.notes.extend(_judge_versions(model))
    _refuse(core, settings)
    report.notes.extend(_judge_backend(core, settings))

    earlier = {module: module.__dict__[STATE] for module in core.modules() if is_patched(module)}
    context = _context_of(earlier, settings)
    refused = why_not_compiled(model) if refusal is None else dict.fromkeys(core.modules(), refusal)
    with stock_modes(_home(core)):
        sites = list(_proved_sites(core, settings, report, earlier, refused))
    taken: list[nn.Module] = []
    try:
        manager.hook.slothplug_before_patch(model=core, sites=tuple(sites), settings=settings)
        for site in sites:
            taken.append(site.module)
            _serve(site, context, registered[site.op], report)
        _mark_subsumed(sites, report)
        for module in (*wrappers, core):
            if report.fused and not is_patched(module):
                taken.append(module)
                take(module, with_call, Outermost(context))  # type: ignore[arg-type]
                context.outermost.add(module)
        for module in (*wrappers, *core.modules()):
            if isinstance(state := module.__dict__.get(STATE), Outermost):
                state.guard.forget()
        manager.hook.slothplug_after_patch(model=core, report=report)
        taken += [module for module in core.modules() if is_patched(module) and module not in {*earlier, *taken}]
        faults = (*manager.load_faults, *manager.faults[faults_before:])
        report.notes.extend(dict.fromkeys(fault.sentence for fault in faults))
        _conclude(report, core)
    except BaseException:
        for module in taken:
            give_back(module)
        raise
    return report, taken


def _context_of(earlier: Mapping[nn.Module, Served[Any, Any] | Outermost], settings: Settings) -> ModelContext:
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


def _home(core: nn.Module) -> torch.device:
    """The device of the model's first weight that is loaded; ``cpu`` where none is."""
    return next((weight.device for weight in core.parameters() if not weight.is_meta), torch.device("cpu"))


def _judge_versions(model: nn.Module) -> Iterator[str]:
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


def _refuse(core: nn.Module, settings: Settings) -> None:
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


def _judge_backend(core: nn.Module, settings: Settings) -> Iterator[str]:
    """Raises where Triton was asked for and cannot serve; yields a note where it was not taken by itself."""
    reason = why_not_triton(_home(core)) if settings.backend != "torch" else None
    if reason and settings.backend == "triton":
        raise SettingsError(
            f"The model was not patched: use_fast_kernels.backend is 'triton', but {reason}. Mend that, or set it "
            f"to 'auto' (PyTorch where Triton cannot serve) or 'torch'."
        )
    if reason:
        yield f"kernels run on PyTorch: {reason}"


def _proved_sites(
    core: nn.Module,
    settings: Settings,
    report: Report,
    earlier: Mapping[nn.Module, Served[Any, Any] | Outermost],
    refused: Mapping[nn.Module, Refusal],
) -> Iterator[Site[Any]]:
    """Yields the sites to patch; enters into the report those that are left, and those that an earlier patch serves."""
    claimed: set[tuple[nn.Module, str]] = set()
    served_by = {module: state.op for module, state in earlier.items() if isinstance(state, Served)}
    for found in plugin_manager().hook.slothplug_find_sites(model=core, settings=settings):
        for item in found:
            if (item.module, item.op) in claimed or not settings.wants(item.op):
                continue
            claimed.add((item.module, item.op))
            server = served_by.get(item.module)
            if item.module in refused and not (isinstance(item, Left) and item.refusal.excused):
                _leave(report, _left(item, refused[item.module]))
            elif isinstance(item, Left):
                _leave(report, item)
            elif isinstance(state := earlier.get(item.module), Served) and server == item.op:
                _enter(report, item, state.calls)
            elif server is not None:
                _leave(report, _left(item, Refusal(f"{server} serves this module", excused=True)))
            elif refusal := why_not_touchable(item.module) or _verdict(item, settings):
                _leave(report, _left(item, refusal))
            else:
                served_by[item.module] = item.op
                yield item


def _verdict(site: Site[Any], settings: Settings) -> Refusal | None:
    """Why the probe refuses ``site``, or None; compares each verdict key once a process."""
    # The class's forward is part of it: somebody may have replaced that one since.
    forward, device = stock_class(site.module).forward, device_of(site.module)
    kernel = (site.kernel.name, site.kernel.backend, _code_of(site.kernel))
    key = (site.op, site.verdict_key, kernel, device.type, forward)
    if not settings.verify:
        return None
    if key not in _verdicts:
        with preserved_rng():
            try:
                refusal = site.prove()
                if refusal is not None and not isinstance(refusal, Refusal):
                    raise TypeError(f"prove returned {type(refusal).__name__}, not Refusal or None")
            except Exception as error:  # a probe that cannot run is a site that cannot be proved, this time
                return Refusal(f"its probe failed: {type(error).__name__}: {error}")
        _verdicts[key] = refusal and refusal.within(f"kernel {site.kernel.name}")
    return _verdicts[key]


def _code_of(kernel: Kernel) -> Hashable:
    """What tells a kernel's function from another of the same name."""
    function = kernel.function
    if not isinstance(function, partial):
        return function
    return function.func, function.args, tuple(sorted(function.keywords.items()))


def _serve(site: Site[Any], context: ModelContext, operation: Operation, report: Report) -> None:
    calls = Calls()
    state = Served(
        op=site.op,
        name=site.name,
        spec=site.spec,
        kernel=site.kernel.function,
        device_type=device_of(site.module).type,
        original=partial(_forward_of, stock_class(site.module)),
        context=context,
        shared=None if operation.shared is None else context.shared(operation.shared),
        calls=calls,
        bind=site.bind,
    )
    take(site.module, lambda base: with_forward(base, site.fast), state)  # type: ignore[arg-type]
    _enter(report, site, calls)


def _forward_of(base: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward that the stock class has now: somebody may have replaced it since the patch."""
    return base.forward(module, *args, **kwargs)


def _mark_subsumed(sites: list[Site[Any]], report: Report) -> None:
    """Links the report's entries of subsumed modules to the entries of the sites that subsume them."""
    entries = {(entry.op, entry.name): entry for entry in report.sites}
    by_module = {site.module: entries[site.op, site.name] for site in sites}
    for site in sites:
        for module in site.subsumes:
            if module in by_module:
                by_module[module].within = by_module[site.module]


def _enter(report: Report, site: Site[Any], calls: Calls) -> None:
    class_name = stock_class(site.module).__name__
    report.sites.append(
        SiteReport(site.op, site.name, class_name, "fused", site.kernel.name, site.kernel.backend, calls=calls)
    )


def _left(site: Site[Any] | Left, refusal: Refusal) -> Left:
    return Left(site.op, site.name, site.module, refusal)


def _leave(report: Report, left: Left) -> None:
    reason, excused = left.refusal
    class_name = stock_class(left.module).__name__
    report.sites.append(SiteReport(left.op, left.name, class_name, "left", reason=reason, excused=excused))


def _conclude(report: Report, core: nn.Module) -> None:
    """Logs the outcome; warns or raises where less was fused than asked for."""
    if not report.settings.verify:
        report.notes.append("verify is false: sites were fused by their types and attributes, without a probe")
    logger.info(report.summary())
    unexcused = [site for site in report.left if not site.excused]
    if report.settings.strict and (unexcused or not report.fused):
        raise NothingFusedError(_why_strict_refuses(report, unexcused))
    if not report.fused:
        wanted = any(report.settings.wants(op) for op in report.operations)
        why = f"nothing in {stock_class(core).__name__} could be fused" if wanted else "its settings leave no operation"
        warnings.warn(
            f"use_fast_kernels is on, but {why}; the model trains as stock does.\n{report}",
            NothingFusedWarning,
            stacklevel=4,
        )


def _why_strict_refuses(report: Report, left: list[SiteReport]) -> str:
    if not left:
        found = "no site was found"
        if report.left:
            first = report.left[0]
            found = f"nothing could be fused: {first.op} at {first.name} ({first.class_name}), for one: {first.reason}"
        return (
            f"use_fast_kernels.strict is true and {found}. Leave use_fast_kernels off for this model, or set strict to "
            f"false.\n{report}"
        )
    counts = Counter(site.op for site in left)
    first = left[0]
    found = ", ".join(f"{count} of {op}" for op, count in counts.items())
    return (
        f"use_fast_kernels.strict is true and sites were left: {found}; the first is {first.op} at {first.name} "
        f"({first.class_name}): {first.reason}. Nothing was changed. Set strict to false to train with what can be "
        f"fused, or leave these operations out with skip_ops: [{', '.join(counts)}].\n{report}"
    )
