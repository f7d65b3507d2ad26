"""What a patch enters into its report, and what it says, warns of and raises at the end."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any

from torch import nn

from slothplug.errors import NothingFusedError, NothingFusedWarning
from slothplug.patching.private_class import stock_class
from slothplug.patching.report import Report, SiteReport
from slothplug.patching.served import Calls
from slothplug.patching.sites import Left, Refusal, Site

logger = logging.getLogger("slothplug")


def mark_subsumed(sites: list[Site[Any]], report: Report) -> None:
    """Links the report's entries of subsumed modules to the entries of the sites that subsume them."""
    entries = {(entry.op, entry.name): entry for entry in report.sites}
    by_module = {site.module: entries[site.op, site.name] for site in sites}
    for site in sites:
        for module in site.subsumes:
            if module in by_module:
                by_module[module].within = by_module[site.module]


def enter(report: Report, site: Site[Any], calls: Calls) -> None:
    class_name = stock_class(site.module).__name__
    report.sites.append(
        SiteReport(site.op, site.name, class_name, "fused", site.kernel.name, site.kernel.backend, calls=calls)
    )


def left_of(site: Site[Any] | Left, refusal: Refusal) -> Left:
    return Left(site.op, site.name, site.module, refusal)


def leave(report: Report, left: Left) -> None:
    reason, excused = left.refusal
    class_name = stock_class(left.module).__name__
    report.sites.append(SiteReport(left.op, left.name, class_name, "left", reason=reason, excused=excused))


def conclude(report: Report, core: nn.Module) -> None:
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
