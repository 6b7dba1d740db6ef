"""The description of a candidate's run in Markdown: its verdict, why, and what to do with it."""

import re
import shlex
from pathlib import Path

from pipeline.registry.summary import Candidate

REASONS = 5
PLAIN = re.compile(r"[\w./:-]+")


def description(candidate: Candidate, sweep: str, model: str, workdir: Path) -> str:
    """Return the description.

    Args:
        candidate: The candidate.
        sweep: Identifier of its sweep.
        model: The checkpoint, as the configuration names it.
        workdir: The work directory.
    """
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    head = f"**{candidate.verdict}**{held}: `{candidate.name}` on {candidate.backend}, against the FP16-KV engine."
    reasons = [f"- {_plain(reason)}" for reason in candidate.reasons[:REASONS]]
    left = len(candidate.reasons) - REASONS
    reasons += [f"- and {left} more, in `checks.json`"] if left > 0 else []
    return "\n\n".join(part for part in (head, "\n".join(reasons), _next_steps(candidate, sweep, model, workdir)) if part)


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


def _plain(text: str) -> str:
    """Return text in one line that is no markup."""
    return " ".join(text.split()).replace("<", "&lt;")
