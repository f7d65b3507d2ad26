"""A model whose rotary embedding alone is patched."""

from __future__ import annotations

from typing import Any

from torch import nn

import slothplug


def rotary_report(model: nn.Module, **settings: Any) -> slothplug.Report:
    report = slothplug.patch(model, {"ops": ["rotary"], **settings})
    for site in report.fused:
        site.calls.count_backward = True
    return report
