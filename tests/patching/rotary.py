"""A model whose rotary embedding alone is patched."""

from __future__ import annotations

from typing import Any

from torch import nn

import slothplug
from tests.backward_calls import count_backward


def rotary_report(model: nn.Module, **settings: Any) -> slothplug.Report:
    report = slothplug.patch(model, {"ops": ["rotary"], **settings})
    count_backward(report)
    return report
