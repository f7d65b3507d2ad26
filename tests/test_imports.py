"""The package's imports run one way, and the core names no operation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "slothplug"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
        path.read_text()
    )
    for path in PACKAGE.rglob("*.py")
    if "bootstrap" not in path.parts and "worker" not in path.parts  # scripts, outside the package's names
}
OPERATIONS = {"rms_norm", "rotary", "glu", "lora", "head"}
MAY_IMPORT = {
    "kernels": {"kernels"},
    "core": {"core", "patching"},
    "patching": {"patching", "core", "kernels"},
    "checkpointing": {"checkpointing", "patching", "core", "kernels"},
    "graphs": {"graphs", "patching", "core", "kernels"},
    "ops": {"ops", "patching", "core", "kernels"},
    "integrations": {"integrations", "ops", "patching", "core", "kernels"},
    "cli": {"cli", "bench", "integrations", "ops", "patching", "core", "kernels"},
    "bench": {"bench", "integrations", "ops", "patching", "core", "kernels"},
}
"""Rooms, and the rooms that they may import. The core is what lies at the top of the package."""


def imports(module: str, *, types: bool) -> Iterator[str]:
    """The modules of this package that ``module`` imports, those inside its functions too: it depends on them as well.

    With ``types`` also what is imported under ``if TYPE_CHECKING``. A room that another must know for its annotations
    is a dependency; a circle of them is none, since they never run.
    """
    tree = MODULES[module]
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [member for member in members if member in MODULES] or [node.module]


def room_of(module: str) -> str:
    room = module.split(".")[1] if "." in module else "core"
    return room if room in MAY_IMPORT else "core"


def test_rooms_import_one_way() -> None:
    wrong = [
        f"{module} imports {target}"
        for module in MODULES
        for target in imports(module, types=True)
        if room_of(target) not in MAY_IMPORT[room_of(module)]
    ]
    assert not wrong


def test_no_operation_imports_another() -> None:
    operations = {module: module.split(".")[2] for module in MODULES if module.startswith("slothplug.ops.")}
    wrong = [
        f"{module} imports {target}"
        for module, operation in operations.items()
        for target in imports(module, types=True)
        if operation in OPERATIONS | {"peft_lora"} and operations.get(target, operation) in OPERATIONS - {operation}
    ]
    assert not wrong


def test_no_circle() -> None:
    graph = {module: set(imports(module, types=False)) for module in MODULES}
    tuple(TopologicalSorter(graph).static_order())


def test_the_core_names_no_operation() -> None:
    """A description may give an operation as an example; code may not compare with its name or import it."""
    core = [module for module in MODULES if module.startswith("slothplug.patching.")]
    core += [f"slothplug.{name}" for name in ("plugins", "hookspecs", "settings")]
    wrong = []
    for module in core:
        for node in ast.walk(MODULES[module]):
            said = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
            wrong += [f"{module} names {one}" for one in said if isinstance(one, str) and one in OPERATIONS]
        wrong += [f"{module} imports {target}" for target in imports(module, types=True) if room_of(target) == "ops"]
    assert not wrong
