"""``patch``: from a model and a flag to a model on fused kernels and a report of what was done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from slothplug.errors import UnsupportedModelError
from slothplug.patching.admission import context_of, home, judge_backend, judge_versions, refuse_model
from slothplug.patching.compiled import why_not_compiled
from slothplug.patching.conclusion import conclude, enter, leave, left_of, mark_subsumed
from slothplug.patching.forward_context import Outermost, with_call
from slothplug.patching.model_context import ModelContext
from slothplug.patching.precision import stock_modes
from slothplug.patching.predicates import device_of, why_not_touchable
from slothplug.patching.private_class import (
    check_undoable,
    give_back,
    is_patched,
    stock_class,
    take,
    why_not_subclassed,
    with_forward,
)
from slothplug.patching.report import Report
from slothplug.patching.served import STATE, Calls, Served
from slothplug.patching.sites import Left, Operation, Refusal, Site
from slothplug.patching.unwrap import wrappers_and_core
from slothplug.patching.verdicts import verdict, why_not_private
from slothplug.plugins import operations, plugin_manager
from slothplug.settings import Settings


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
    report.notes.extend(judge_versions(model))
    refuse_model(core, settings)
    report.notes.extend(judge_backend(core, settings))

    earlier = {module: module.__dict__[STATE] for module in core.modules() if is_patched(module)}
    context = context_of(earlier, settings)
    refused = why_not_compiled(model) if refusal is None else dict.fromkeys(core.modules(), refusal)
    with stock_modes(home(core)):
        sites = list(_proved_sites(core, settings, report, earlier, refused))
    taken: list[nn.Module] = []
    try:
        manager.hook.slothplug_before_patch(model=core, sites=tuple(sites), settings=settings)
        for site in sites:
            taken.append(site.module)
            _serve(site, core, context, registered[site.op], report)
        mark_subsumed(sites, report)
        for module in (*wrappers, core):
            if report.fused and not is_patched(module):
                if refusal := why_not_subclassed(module, with_call):  # type: ignore[arg-type]
                    raise UnsupportedModelError(f"The model was not patched: {type(module).__name__}, {refusal.reason}")
                taken.append(module)
                take(module, with_call, Outermost(context))  # type: ignore[arg-type]
                context.outermost.add(module)
        for module in (*wrappers, *core.modules()):
            if isinstance(state := module.__dict__.get(STATE), Outermost):
                state.guard.forget()
        manager.hook.slothplug_after_patch(model=core, report=report)
        ours = {*earlier, *taken}
        taken += [module for module in core.modules() if is_patched(module) and module not in ours]
        faults = (*manager.load_faults, *manager.faults[faults_before:])
        report.notes.extend(dict.fromkeys(fault.sentence for fault in faults))
        conclude(report, core)
    except BaseException:
        for module in taken:
            give_back(module)
        raise
    return report, taken


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
                leave(report, left_of(item, refused[item.module]))
            elif isinstance(item, Left):
                leave(report, item)
            elif isinstance(state := earlier.get(item.module), Served) and server == item.op:
                enter(report, item, state.calls)
            elif server is not None:
                leave(report, left_of(item, Refusal(f"{server} serves this module", excused=True)))
            elif refusal := why_not_touchable(item.module) or why_not_private(item) or verdict(item, core, settings):
                leave(report, left_of(item, refusal))
            else:
                served_by[item.module] = item.op
                yield item


def _serve(site: Site[Any], core: nn.Module, context: ModelContext, operation: Operation, report: Report) -> None:
    calls = Calls()
    state = Served(
        op=site.op,
        name=site.name,
        spec=site.spec,
        kernel=site.kernel.function,
        device_type=device_of(site.module, core).type,
        original=partial(_forward_of, stock_class(site.module)),
        context=context,
        shared=None if operation.shared is None else context.shared(operation.shared),
        calls=calls,
        bind=site.bind,
    )
    take(site.module, lambda base: with_forward(base, site.fast), state)  # type: ignore[arg-type]
    enter(report, site, calls)


def _forward_of(base: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward that the stock class has now: somebody may have replaced it since the patch."""
    return base.forward(module, *args, **kwargs)
