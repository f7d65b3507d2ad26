"""The table of other projects' failures and the tests that keep them from this one, in ``tests/README.md``.

Collected from the tests themselves: a test that names an issue or pull request of another project guards against it.

    python -m tests.known_failures        writes the table
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
HEADING = "## Known failures of other projects\n"
UPSTREAM = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(issues|pull)/(\d+)")


def tests_by_report() -> dict[tuple[str, int, str], list[str]]:
    """For each report, as (project, number, address): the tests that name it, as ``file::test``."""
    found: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for file in sorted(FOLDER.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        for test in _tests(ast.parse(source)):
            for match in UPSTREAM.finditer(ast.get_source_segment(source, test) or ""):
                name = f"{file.relative_to(FOLDER).as_posix()}::{test.name}"
                key = (match[1].partition("/")[2], int(match[3]), match[0])
                if name not in found[key]:
                    found[key].append(name)
    return found


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def table() -> str:
    lines = ["| report | tests |", "|---|---|"]
    for (project, number, address), tests in sorted(tests_by_report().items()):
        lines.append(f"| [{project} {number}]({address}) | {'<br>'.join(f'`{test}`' for test in sorted(tests))} |")
    return "\n".join(lines) + "\n"


def text() -> str:
    """What ``tests/README.md`` should hold: all before the heading as it is, and the table."""
    before = README.read_text(encoding="utf-8").partition(HEADING)[0]
    return (
        f"{before}{HEADING}\nEach of these was reported elsewhere and has a test here. "
        f"Written by `python -m tests.known_failures`.\n\n{table()}"
    )


if __name__ == "__main__":
    README.write_text(text(), encoding="utf-8")
