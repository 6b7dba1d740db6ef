"""The description of a candidate's run in Markdown: its verdict, why, and what to do with it."""

import shlex
from pathlib import Path

from pipeline.core.overrides import written
from pipeline.registry.summary import Candidate

REASONS = 5


def description(candidate: Candidate, sweep: str, model: str, workdir: Path) -> str:
    """Return the description."""
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    head = f"**{candidate.verdict}**{held}: `{candidate.name}` on {candidate.backend}, against the FP16-KV engine, "
    head += f"{'; '.join(candidate.figures)}."
    reasons = [f"- {_plain(reason)}" for reason in candidate.reasons[:REASONS]]
    left = len(candidate.reasons) - REASONS
    reasons += [f"- and {left} more, in `checks.json`"] if left > 0 else []
    return "\n\n".join(part for part in (head, "\n".join(reasons), _next_steps(candidate, sweep, model, workdir)) if part)


def _next_steps(candidate: Candidate, sweep: str, model: str, workdir: Path) -> str:
    where = [f"model.path={written(model)}", f"workdir={written(str(workdir))}"]
    replay = shlex.join(["stage=verify", f"bundle={written(str(candidate.identity.path.parent))}"])
    lines = [f"python -m pipeline {replay}  # replay the evidence"]
    if candidate.verdict == "PASS":
        promote = shlex.join([*where, "stage=promote", f"promote.sweep={sweep}", f"promote.name={written(candidate.name)}"])
        lines.append(f"python -m pipeline {promote}  # make it the champion; repeat the gates.* of its evaluation")
    return "\n".join(["```sh", *lines, "```"])


def _plain(text: str) -> str:
    """Return text in one line that is no markup."""
    return " ".join(text.split()).replace("<", "&lt;")
