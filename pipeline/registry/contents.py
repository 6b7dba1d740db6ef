"""What the tracking store keeps of a candidate: the page and colour of its run, and the files of its model version."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.kv import POLICY_FILE
from pipeline.core.redaction import copy_redacted, redact, redact_text
from pipeline.core.scales import SCALES_FILE
from pipeline.registry.summary import DECIDED, Candidate
from pipeline.trust.statement import SIGNATURE_FILE

COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#bf8700"}
"""Of runs in MLflow's charts, by verdict."""
UNDECIDED = "#6e7781"
EVIDENCE_FILES = ("bundle.json", POLICY_FILE, SCALES_FILE)


HIDDEN = "mlflow.kvgate."
"""Tags of a registered model that begin so are not on MLflow's page of it; those of an older kvgate do not."""


def told(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a registered model by the names that kvgate gave them."""
    return {name.removeprefix(HIDDEN): text for name, text in tags.items()}


@dataclass(frozen=True)
class Workload:
    """A kind of work that was asked."""

    name: str
    digest: str
    """sha256 of every sample of the evaluation, all kinds of work together."""
    samples: int
    documents: int
    scored_tokens: int


@dataclass(frozen=True)
class RunPage:
    """What a candidate's run shows; `pipeline.pages` makes it."""

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """In the order in which they are logged; one that is null or not finite is only named."""
    baseline: Mapping[str, float] = field(default_factory=dict)
    """Of the FP16 engine, under the same names."""
    description: str = ""
    """Markdown."""
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """File name -> rows."""
    workloads: Sequence[Workload] = ()


EMPTY_PAGE = RunPage()


def registered_as(model_name: str, version: str) -> str:
    """Return what a run's description ends with: where its engine is registered."""
    fetch = f"mlflow artifacts download --artifact-uri models:/{model_name}/{version} --dst-path engine"
    return f"Registered as version {version} of `{model_name}`:\n\n```sh\n{fetch}\n```"


def verdict_line(candidate: Candidate) -> str:
    """Return the description of a version: its verdict, what it keeps and costs, and why it did not pass where it did not."""
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    why = [candidate.reasons[0]] if candidate.verdict != "PASS" and candidate.reasons else []
    return redact_text(". ".join([f"{candidate.verdict}{held}: {'; '.join(candidate.figures)}", *why]))


def collect_evidence(candidate: Candidate, folder: Path) -> None:
    """Fill `folder` with the files that every version carries; together with `engine/`, stage=verify replays them.

    The user's own samples file is not copied: prompts stay where they are.
    """
    files = [candidate.engine.path / name for name in EVIDENCE_FILES]
    files += [candidate.report.path, candidate.samples, candidate.identity.path]
    files += [candidate.identity.path.with_name(SIGNATURE_FILE)]
    for path in files:
        if path.is_file():
            copy_redacted(path, folder / path.name)
    verdict = candidate.model_dump(mode="json", include={*DECIDED, "metrics"})
    (folder / "verdict.json").write_text(json.dumps(redact(verdict), indent=2), encoding="utf-8")
