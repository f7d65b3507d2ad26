"""Counts the backward passes of what a patched model fused."""

from __future__ import annotations

from functools import partial

import torch

import slothplug
from slothplug.patching.served import Calls


def count_backward(report: slothplug.Report) -> None:
    """From now on ``calls.backward`` of each fused site is the number of backward passes through its served outputs."""
    for site in report.fused:
        site.calls.backward = 0
        site.calls.serve = partial(_serve, site.calls)


def _serve(calls: Calls, output: torch.Tensor) -> torch.Tensor:
    def count(*_: object) -> None:
        calls.backward += 1

    if output.grad_fn is not None:
        output.grad_fn.register_prehook(count)
    return Calls.serve(calls, output)
