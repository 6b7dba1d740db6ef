"""The description of a candidate's run: its verdict as a table, why, and what to do with it, in Markdown."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.registry.summary import Candidate
from pipeline.verdict.thresholds import Check

LIMIT = 4200
"""Characters, of the 5,000 that a tag has: the registry says its part in the rest."""
REASONS = 5
ORDER = ("FAIL", "INCONCLUSIVE", "WARNING", "PASS")
HEADING = "| status | gate | where | value | bound | threshold |\n|---|---|---|---:|---:|---:|"
PLAIN = re.compile(r"[\w./:-]+")


def description(candidate: Candidate, sweep: str, model: str, workdir: Path) -> str:
    """Return the description; lines of the verdict that do not fit are only counted, those that passed first.

    Args:
        candidate: The candidate.
        sweep: Identifier of its sweep.
        model: The checkpoint, as the configuration names it.
        workdir: The work directory.
    """
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    head = f"**{candidate.verdict}**{held}: `{candidate.name}` on {candidate.backend}, against the FP16-KV engine."
    parts = [head, _reasons(candidate), _next_steps(candidate, sweep, model, workdir)]
    room = LIMIT - sum(len(part) + 2 for part in parts)
    parts.insert(1, _table(candidate.checks, room))  # MLflow shows the first lines alone until somebody asks for more
    return "\n\n".join(part for part in parts if part)


def _reasons(candidate: Candidate) -> str:
    lines = [f"- {_cell(reason)}" for reason in candidate.reasons[:REASONS]]
    left = len(candidate.reasons) - REASONS
    return "\n".join(lines + ([f"- and {left} more, in `checks.json`"] if left > 0 else []))


def _table(checks: Sequence[Check], room: int) -> str:
    """Return the lines of the verdict, the worst first, as many as fit."""
    lines = [HEADING]
    ordered = sorted(checks, key=lambda check: ORDER.index(check.status))
    for number, check in enumerate(ordered):
        numbers = " | ".join(_number(value) for value in (check.value, check.bound, check.threshold))
        line = f"| {check.status} | {_cell(check.gate)} | {_cell(check.where)} | {numbers} |"
        note = f"\n{len(ordered) - number} more lines are in `checks.json`."
        if sum(len(one) + 1 for one in lines) + len(line) + len(note) > room:
            return "\n".join([*lines, note])
        lines.append(line)
    return "\n".join(lines) if checks else ""


def _next_steps(candidate: Candidate, sweep: str, model: str, workdir: Path) -> str:
    where = [f"model.path={_value(model)}", f"workdir={_value(str(workdir))}"]
    replay = shlex.join(["stage=verify", f"bundle={_value(str(candidate.identity.path.parent))}"])
    lines = [f"python -m pipeline {replay}  # replay the evidence"]
    if candidate.verdict == "PASS":
        promote = shlex.join([*where, "stage=promote", f"promote.sweep={sweep}", f"promote.name={_value(candidate.name)}"])
        lines.append(f"python -m pipeline {promote}  # make it the champion; repeat the gates.* of its evaluation")
    return "\n".join(["```sh", *lines, "```"])


def _value(text: str) -> str:
    """Quote the value of an override for Hydra where it has to be."""
    return text if PLAIN.fullmatch(text) else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell(text: str) -> str:
    """Return text that breaks no table and is no markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
