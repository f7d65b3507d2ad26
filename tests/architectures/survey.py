"""For every causal LM type of the installed transformers: what slothplug finds and serves, and if the numbers stay.

    python -m tests.architectures.survey --output docs/architectures        # all types, half an hour on two cores
    python -m tests.architectures.survey llama qwen3 --output /tmp/two      # some

Each type runs in a process of its own: a small random model, one training step (loss and every gradient) stock and one
patched with the same seed, in float32. A site counts as served only if its fused path ran forward and backward in that
step; a model counts for an operation when every site that is not excused is served.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

OPS = ("head", "rms_norm", "rotary", "glu", "lora")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
TIMEOUT_SECONDS = 400


def survey(model_type: str) -> dict[str, Any]:
    """One row of the table, as plain data."""
    import torch

    from tests.architectures.build import tiny_model

    torch.set_num_threads(1)
    row: dict[str, Any] = {"type": model_type}
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return {**row, "not_built": _short(error)}
    row["class"] = type(model).__name__
    try:
        stock = _step(model)
    except Exception as error:
        return {**row, "not_run": _short(error)}
    row["plain"] = _compare(model, stock)
    row["lora"] = _survey_lora(model)
    return row


def _survey_lora(model: Any) -> dict[str, Any] | None:
    """The same with an adapter on every linear of the decoder; None where PEFT cannot make one."""
    import torch
    from peft import LoraConfig, get_peft_model

    import slothplug

    slothplug.unpatch(model)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    try:
        adapted = get_peft_model(model, config)
        stock = _step(adapted)
    except Exception as error:
        return {"not_run": _short(error)}
    return _compare(adapted, stock)


def _compare(model: Any, stock: tuple[Any, Mapping[str, Any]]) -> dict[str, Any]:
    import warnings

    import slothplug

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", slothplug.NothingFusedWarning)
        try:
            report = slothplug.patch(model)
        except Exception as error:
            return {"error": _short(error), "equal": False}
    for site in report.fused:
        site.calls.count_backward = True
    try:
        loss, grads = _step(model)
    except Exception as error:
        return {"error": _short(error), "equal": False}
    ops = {}
    for op, sites in report.by_op().items():
        counted = [site for site in sites if not site.excused]
        served = [site for site in counted if site.status == "fused" and site.calls.served and site.calls.backward]
        reasons = {site.reason for site in counted if site.status == "left"}
        for site in counted:
            if site.status == "fused" and site not in served:
                reasons |= set(site.calls.fallbacks) or {"not reached in this step"}
        ops[op] = {
            "sites": len(counted), "served": len(served), "excused": len(sites) - len(counted),
            "reasons": sorted(reasons),
        }  # fmt: skip
    largest = max(float(g.abs().max()) for g in stock[1].values())
    loss_error = abs(float(loss) - float(stock[0]))
    grad_error = (
        max(float((grads[n] - g).abs().max()) for n, g in stock[1].items()) / largest
        if grads.keys() == stock[1].keys()
        else float("inf")
    )
    equal = loss_error <= LOSS_TOLERANCE * max(1.0, abs(float(stock[0]))) and grad_error <= GRADIENT_TOLERANCE
    return {
        "equal": equal,
        "loss_error": loss_error,
        "gradient_error": grad_error,
        "ops": ops,
        "shared_inputs": _siblings(report),
    }


def _siblings(report: Any) -> int:
    """Sibling LoRA linears that were answered from a node computed for another."""
    return sum(getattr(site.calls, "collected", 0) for site in report.fused if site.op == "lora")


def _step(model: Any) -> tuple[Any, dict[str, Any]]:
    """Loss and every gradient of one seeded training step on 2 x 16 tokens, four of each row ignored."""
    import torch

    ids = torch.randint(3, 120, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    model.train()
    model.zero_grad()
    torch.manual_seed(7)
    output = model(input_ids=ids, labels=labels, use_cache=False)
    loss = output.loss if hasattr(output, "loss") else output[0]
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError("the small model's loss is not finite")
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def in_process(model_type: str) -> dict[str, Any]:
    """``survey`` in a process of its own, so that one type's failure or memory touches no other."""
    command = [sys.executable, "-m", "tests.architectures.survey", "--one", model_type]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"type": model_type, "not_run": f"took longer than {TIMEOUT_SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            return json.loads(line.removeprefix("ROW "))  # type: ignore[no-any-return]
    return {"type": model_type, "not_run": f"process ended with {done.returncode}: {done.stderr[-160:]}"}


def served(row: Mapping[str, Any], op: str) -> bool:
    """Whether the model counts for ``op``: it has sites of the kind, and every one that is not excused is served."""
    part = row.get("lora" if op == "lora" else "plain") or {}
    found = part.get("ops", {}).get(op, {"sites": 0, "served": 0})
    return bool(part.get("equal")) and found["sites"] > 0 and found["sites"] == found["served"]


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The counts that the table is judged by."""
    rows = list(rows)
    ran = [row for row in rows if "plain" in row]
    count = {"types": len(rows), "run": len(ran)}
    count |= {op: sum(served(row, op) for row in ran) for op in OPS}
    count["all four"] = sum(all(served(row, op) for op in OPS[:4]) for row in ran)
    count["unequal"] = sum(not part.get("equal", True) for row in ran for part in (row["plain"], row["lora"] or {}))
    return count


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page ``docs/architectures.md``."""
    import transformers

    rows = list(rows)
    count = totals(rows)
    served = ", ".join(f"{op} {count[op]}" for op in (*OPS, "all four"))
    lines = [
        "# Architectures",
        "",
        f"Every causal LM type of transformers {transformers.__version__}: a small random model of each, one training "
        "step stock and one patched. A cell is sites served / found; a site is served only if its fused path ran "
        "forward and backward in that step, and `=` says that the loss and every gradient equal the unpatched model's "
        f"in float32 (loss {LOSS_TOLERANCE:.0e}, gradients {GRADIENT_TOLERANCE:.0e} of the largest). Made by",
        "",
        "    python -m tests.architectures.survey --output docs/architectures",
        "",
        "Gated norms, latent attention (MLA), 3-D experts and linear attention stay stock and are counted as excused.",
        "",
        f"Of {count['types']} types {count['run']} could be built small and trained a step. "
        f"Models with every site of a kind served: {served}. Unequal: {count['unequal']}.",
        "",
        "| type | head | rms_norm | rotary | glu | equal | lora | equal | left, and why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(_table_row(row))
    return "\n".join(lines) + "\n"


def _table_row(row: Mapping[str, Any]) -> str:
    if "plain" not in row:
        why = row.get("not_built") or row.get("not_run")
        return f"| {row['type']} | | | | | | | | no step: {str(why).replace('|', '/')} |"
    plain, lora = row["plain"], row["lora"] or {}
    cells = [_cell(plain, op) for op in OPS[:4]] + [_equal(plain), _cell(lora, "lora"), _equal(lora)]
    why = sorted({
        f"{op}: {reason}"
        for part in (plain, lora)
        for op, found in part.get("ops", {}).items()
        for reason in found["reasons"]
    } | {part["error"] for part in (plain, lora) if "error" in part})  # fmt: skip
    return f"| {row['type']} | " + " | ".join(cells) + " | " + "; ".join(why).replace("|", "/") + " |"


def _cell(part: Mapping[str, Any], op: str) -> str:
    found = part.get("ops", {}).get(op)
    return f"{found['served']}/{found['sites']}" if found and found["sites"] else "-"


def _equal(part: Mapping[str, Any]) -> str:
    return "=" if part.get("equal") else ("differs" if "equal" in part else "-")


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Model types; all by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Writes OUTPUT.md and OUTPUT.json.")] = None,
    workers: int = 2,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Surveys model types and writes the table."""
    if one:
        print("ROW " + json.dumps(survey(one)), flush=True)
        return
    from tests.architectures.build import causal_lm_types

    names = types or causal_lm_types()
    rows = []
    with ThreadPoolExecutor(workers) as pool:
        for row in pool.map(in_process, names):
            print(_table_row(row), flush=True)
            rows.append(row)
    print(totals(rows))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
