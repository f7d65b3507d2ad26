"""The architecture table: which model counts for which operation, the totals, and the page made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.architectures.one import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NOISE_FACTOR

OPS = ("head", "rms_norm", "rotary", "glu", "lora")
ALL_FOUR = OPS[:4]

PREFACE = f"""# Architectures

Every causal LM type of transformers, as a small random model; {{versions}}. Made by

    python -m tests.architectures.survey --output docs/architectures

A cell is the number of sites served and the number found. A site is served only if its fused path ran forward and
backward in a training step; a module that the stock step does not run in both directions is no site. `=` says that
the loss and every gradient of that step are those of the unpatched model in float32: the loss to
{LOSS_TOLERANCE:.0e}, gradients to {GRADIENT_TOLERANCE:.0e} of the largest. `= (noise)`: a model that magnifies
roundings is as near as {NOISE_FACTOR} times what stock differs from itself with every weight moved to a
neighbouring float32. The column lora is a second step, with an adapter on every linear layer; siblings are the
attentions whose q, k and v are layers of their own, and those of them that were computed by one node.

Gated norms, latent attention (MLA), 3-D experts and linear attention may stay stock; where they are sites at all,
they are not in the counts and are named in the last column.

{{summary}}

| type | head | rms_norm | rotary | glu | equal | lora | siblings | equal | not served, and why |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""

Row = Mapping[str, Any]


def part(row: Row, op: str) -> Mapping[str, Any]:
    """The compared step that an operation is judged by: with adapters for LoRA, without for the others."""
    return row.get("lora" if op == "lora" else "plain") or {}


def has(row: Row, op: str) -> bool:
    """Whether the model has sites of ``op`` that count."""
    return part(row, op).get("ops", {}).get(op, {}).get("sites", 0) > 0


def served(row: Row, op: str) -> bool:
    """Whether the model counts for ``op``: every site that is not excused is served, and the numbers are stock's."""
    if not has(row, op) or not part(row, op)["equal"]:
        return False
    found = part(row, op)["ops"][op]
    return bool(found["sites"] == found["served"])


def shares(row: Row) -> bool:
    """Whether all its attentions with separate q, k and v layers are computed by one node each."""
    found = part(row, "lora").get("qkv", {"attentions": 0, "shared": 0})
    return bool(found["attentions"]) and found["attentions"] == found["shared"]


def totals(rows: Iterable[Row]) -> dict[str, int]:
    """The counts that the table is judged by."""
    rows = list(rows)
    ran = [row for row in rows if "equal" in row.get("plain", {})]
    count = {"types": len(rows), "run": len(ran)}
    for op in OPS:
        count[op] = sum(served(row, op) for row in ran)
        count[f"{op}, of"] = sum(has(row, op) for row in ran)
    count["all four"] = sum(all(served(row, op) for op in ALL_FOUR) for row in ran)
    count["siblings"] = sum(shares(row) for row in ran)
    count["siblings, of"] = sum(part(row, "lora").get("qkv", {}).get("attentions", 0) > 0 for row in ran)
    count["unequal"] = sum(not compared["equal"] for row in ran for compared in _compared(row))
    return count


def _compared(row: Row) -> list[Mapping[str, Any]]:
    return [row[name] for name in ("plain", "lora") if "equal" in row.get(name, {})]


def markdown(rows: Iterable[Row], versions: str) -> str:
    """The page ``docs/architectures.md``."""
    rows = list(rows)
    count = totals(rows)
    counted = ", ".join(f"{op} {count[op]} of {count[f'{op}, of']}" for op in (*OPS, "siblings"))
    summary = (
        f"Of {count['types']} types {count['run']} could be built small and trained a step. Models with every site "
        f"served, of those that have any: {counted}; the first four at once: {count['all four']}. "
        f"Steps that differ from stock: {count['unequal']}."
    )
    return "\n".join([PREFACE.format(versions=versions, summary=summary), *(table_row(row) for row in rows)]) + "\n"


def table_row(row: Row) -> str:
    """A line of the table."""
    if "equal" not in row.get("plain", {}):
        why = row.get("not_built") or row["plain"]["not_run"]
        return f"| {row['type']} | | | | | | | | | no step: {_escaped(why)} |"
    plain, lora = row["plain"], row["lora"]
    cells = [*(_cell(plain, op) for op in ALL_FOUR), _equal(plain), _cell(lora, "lora"), _siblings(lora), _equal(lora)]
    return f"| {row['type']} | {' | '.join(cells)} | {_escaped('; '.join(_reasons(row)))} |"


def _reasons(row: Row) -> list[str]:
    reasons = []
    for op in OPS:
        found = part(row, op).get("ops", {}).get(op, {})
        reasons += [f"{op}: {reason}" for reason in found.get("reasons", ())]
        reasons += [f"{op}, excused: {reason}" for reason in found.get("excused", ())]
    reasons += [f"siblings: {reason}" for reason in row["lora"].get("qkv", {}).get("alone", ())]
    reasons += [row[name][key] for name in ("plain", "lora") for key in ("error", "not_run") if key in row[name]]
    return reasons


def _cell(compared: Mapping[str, Any], op: str) -> str:
    found = compared.get("ops", {}).get(op)
    return f"{found['served']}/{found['sites']}" if found and found["sites"] else "-"


def _siblings(compared: Mapping[str, Any]) -> str:
    found = compared.get("qkv")
    return f"{found['shared']}/{found['attentions']}" if found and found["attentions"] else "-"


def _equal(compared: Mapping[str, Any]) -> str:
    if "equal" not in compared:
        return "-"
    if not compared["equal"]:
        return "differs"
    within = compared["loss_error"] <= LOSS_TOLERANCE and compared["gradient_error"] <= GRADIENT_TOLERANCE
    return "=" if within else "= (noise)"


def _escaped(text: str) -> str:
    return text.replace("|", "/")
