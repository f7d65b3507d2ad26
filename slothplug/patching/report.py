"""What a patch did: a table a person reads, the same as a mapping, and the way back."""

from __future__ import annotations

import io
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from slothplug.patching.forward_context import Outermost
from slothplug.patching.private_class import check_undoable, give_back
from slothplug.patching.served import STATE, Calls
from slothplug.settings import Settings


@dataclass
class SiteReport:
    """One module: what became of it, and how its calls went."""

    op: str
    name: str
    class_name: str
    status: Literal["fused", "left"]
    kernel: str = ""
    backend: str = ""
    reason: str = ""
    excused: bool = False
    calls: Calls = field(default_factory=Calls)
    within: SiteReport | None = None
    """The fused site that computes this one's share as well, whenever it serves."""

    @property
    def answered(self) -> bool:
        """Whether a call of this module was served, by itself or by the site that it is within."""
        return bool(self.calls.served) or (self.within is not None and self.within.answered)

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "module": self.name,
            "class": self.class_name,
            "status": self.status,
            "kernel": self.kernel,
            "backend": self.backend,
            "reason": self.reason,
            "calls": {
                "served": self.calls.served,
                "fallbacks": dict(self.calls.fallbacks),
                "remarks": dict(self.calls.remarks),
            },
        }


class Report:
    """The outcome of ``slothplug.patch``.

    ``print(report)`` shows a table, ``to_dict()`` returns plain data for JSON, ``summary()`` is one line for a log, and
    ``undo()`` makes the model what it was.

    Attributes:
        sites: one entry for each module that was considered.
        settings: the settings of the patch.
        notes: sentences about the patch as a whole.
        live: functions that say how the patched model has run since.
    """

    def __init__(self, model: nn.Module, settings: Settings, operations: list[str]) -> None:
        self._model = weakref.ref(model)
        self.settings = settings
        self.operations = operations
        self.sites: list[SiteReport] = []
        self.notes: list[str] = []
        self.live: list[Callable[[], list[str]]] = []

    @property
    def fused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.status == "fused"]

    @property
    def left(self) -> list[SiteReport]:
        return [site for site in self.sites if site.status == "left"]

    def undo(self) -> None:
        """Gives every module of the patched model its own class back. Safe to call twice.

        Raises:
            UndoError: another class was put above ours since the patch.
        """
        model = self._model()
        if model is not None:
            unpatch(model)

    def by_op(self) -> dict[str, list[SiteReport]]:
        """The sites of each operation, in the order of registration; operations without sites have an empty list."""
        groups: dict[str, list[SiteReport]] = {op: [] for op in self.operations}
        for site in self.sites:
            groups.setdefault(site.op, []).append(site)
        return groups

    def since_patched(self) -> list[str]:
        """Sentences about how the model has run since."""
        return [line for say in self.live for line in say()]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "settings": self.settings.model_dump(),
            "operations": {
                op: {
                    "found": len(sites),
                    "fused": sum(site.status == "fused" for site in sites),
                    "left": sum(site.status == "left" for site in sites),
                }
                for op, sites in self.by_op().items()
            },
            "sites": [site.to_dict() for site in self.sites],
            "notes": [*self.notes, *self.since_patched()],
        }

    def idle(self) -> dict[str, str]:
        """Operations with fused sites of which none has answered a call, and why."""
        found = {}
        for op, sites in self.by_op().items():
            fused = [site for site in sites if site.status == "fused"]
            if fused and not any(site.answered for site in fused):
                reasons = sorted({reason for site in fused for reason in site.calls.fallbacks})
                found[op] = "; ".join(reasons) or "never called"
        return found

    def summary(self) -> str:
        """One line: what was fused, how much was left."""
        parts = []
        for op, sites in self.by_op().items():
            fused = [site for site in sites if site.status == "fused"]
            if sites:
                backends = ", ".join(sorted({site.backend for site in fused}))
                parts.append(f"{op} {len(fused)}/{len(sites)}" + (f" ({backends})" if backends else ""))
        return "slothplug: " + ("; ".join(parts) if parts else "no fusable module found")

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=118, color_system=None, legacy_windows=False)
        for part in self.__rich_console__(console, None):
            console.print(part)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip("\n")

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Table

        table = Table(title="slothplug", title_justify="left")
        for column in ("op", "found", "fused", "left", "kernel", "calls served", "fallen back"):
            table.add_column(column, justify="left" if column in ("op", "kernel") else "right")
        for op, sites in self.by_op().items():
            fused = [site for site in sites if site.status == "fused"]
            kernels = ", ".join(sorted({f"{site.kernel} [{site.backend}]" for site in fused})) or "-"
            served = sum(site.calls.served for site in fused)
            back = sum(site.calls.fallbacks.total() for site in fused)
            table.add_row(
                op, str(len(sites)), str(len(fused)), str(len(sites) - len(fused)), kernels.replace("[", r"\["),
                str(served), str(back),
            )  # fmt: skip
        yield table
        for line in self._reasons():
            yield line.replace("[", r"\[")

    def _reasons(self) -> list[str]:
        """Lines about what was left and what fell back, equal ones gathered."""
        groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for site in self.left:
            groups["left", site.op, f"{site.class_name}: {site.reason}"].append(site.name)
        for site in self.fused:
            for reason in site.calls.fallbacks:
                groups["fell back", site.op, f"{site.class_name}: {reason}"].append(site.name)
            for remark in site.calls.remarks:
                groups["slower", site.op, f"{site.class_name}: {remark}"].append(site.name)
        lines = []
        for (what, op, reason), names in groups.items():
            where = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            lines.append(f"{what}: {op} at {where} - {reason}")
        if any(site.calls.served for site in self.fused):
            lines += [f"idle: {op} - {reason}" for op, reason in self.idle().items() if reason == "never called"]
        lines += [f"skipped: {op}, by the settings" for op in self.operations if not self.settings.wants(op)]
        lines += self.since_patched()
        return lines + [f"note: {note}" for note in self.notes]


def unpatch(model: nn.Module) -> None:
    """Makes ``model`` (also a copy or a wrapper of a patched model) what it was. Does nothing to an unpatched one.

    Wrappers that a later patch of the same model served (PEFT's) are given back with it.

    Raises:
        UndoError: another class was put above ours since the patch; no module was changed.
    """
    modules = dict.fromkeys(model.modules())
    states = [module.__dict__.get(STATE) for module in modules]
    for context in {state.context for state in states if isinstance(state, Outermost)}:
        for wrapper in context.outermost:
            modules |= dict.fromkeys(wrapper.modules())
    check_undoable(modules)
    for module in modules:
        give_back(module)
