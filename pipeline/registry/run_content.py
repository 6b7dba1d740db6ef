"""The content that MLflow displays of a candidate: metrics, description and tables of its run, files of its model version.

MLflow compares runs by the metric that was logged first, and draws a chart of every metric. So a run has few metrics, and the
metrics that decide the choice of an engine come first. All numbers are in summary.json and report.json.
"""

import json
import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from getpass import getuser
from pathlib import Path
from typing import Any

from pipeline.config.signing import SIGNATURE_FILE
from stages.core.redaction import leaves, redact, redact_text
from stages.verdict.candidate import Candidate
from stages.verdict.report import SampleRow

COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#bf8700"}
"""Colour of a run in MLflow's charts, by verdict."""
UNDECIDED = "#6e7781"
REASONS = 5
"""Maximum reasons of a verdict in the description; report.html has all."""
LIMIT = 40
KL, LOG_KL, MIN_KL = "quality/kl_mean", "quality/kl_mean_log10", 1e-9
"""MLflow's bar charts have no logarithmic axis, so the logarithm of the KL (of at least MIN_KL) is a metric of its own."""
FIRST = ("quality/recovery", LOG_KL, "memory/kib_per_token")
"""First metrics of the comparison: kept probability of right answers, distance, memory."""
THEN = (
    KL, "quality/accuracy_loss", "memory/max_live_tokens", "quality/accuracy_candidate", "quality/ppl_ratio",
    "quality/top10_overlap", "quality/top1_agreement", "quality/kl_p999", "quality/kl_max",
    "quality/samples", "quality/covered_tokens", "quality/covered_batch", "perf/decode_tokens_per_s",
    "perf/time_to_first_token_ms", "perf/inter_token_p50_ms", "perf/inter_token_p95_ms", "perf/inter_token_p99_ms",
    "quality/acceptance_lookup_candidate", "quality/acceptance_draft_candidate",
)  # fmt: skip
BY_WORKLOAD = ("recovery", "kl_mean", "accuracy_loss")
"""Metrics per workload, in alphabetical order of workloads, until LIMIT is reached."""
OUTCOMES = {
    (True, False): "lost",
    (False, True): "gained",
    (False, False): "wrong in both",
    (True, True): "right in both",
    (None, None): "not judged",
}
"""(baseline right, candidate right) -> outcome, in the order of the table: lost answers first."""
SHOWN = (
    "workload", "context_tokens", "reference", "baseline_generation", "candidate_generation", "mean_kl", "max_kl",
    "baseline_probability", "candidate_probability", "top10_overlap", "top1_agreement", "baseline_nll", "candidate_nll",
    "difficulty", "scored_tokens", "round", "document", "id",
)  # fmt: skip
"""Columns of the samples' table after the outcome: answers before measurements."""


def author(environ: Mapping[str, str] = os.environ) -> str:
    """Return who makes a run or moves an alias: the address of the CI run (GitHub, GitLab or Jenkins), or user and host."""
    github = [environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")]
    run = "{}/{}/actions/runs/{}".format(*github) if all(github) else environ.get("CI_JOB_URL") or environ.get("BUILD_URL")
    if run:
        return redact_text(run)
    try:
        user = getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return a configuration as MLflow's parameters: dotted names and texts, without secrets."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in leaves(redact(config))
    }


def run_tables(candidate: Candidate, rows: Sequence[SampleRow]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of answers and checks, which MLflow compares across runs: file name -> rows.

    Samples are sorted by outcome, lost answers first. Within an outcome, samples without a finite KL come first, then the
    largest KL.
    """
    ordered = sorted(rows, key=lambda row: (row.mean_kl is not None, -(row.mean_kl or 0.0)))
    samples = [
        {"answer": outcome} | {name: getattr(row, name) for name in SHOWN}
        for judged, outcome in OUTCOMES.items()
        for row in ordered
        if (row.baseline_correct, row.candidate_correct) == judged
    ]
    return {"samples.json": samples, "checks.json": [check.model_dump() for check in candidate.checks]}


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with identical keys as the JSON that MLflow shows as a table."""
    data = [[redact(value) for value in row.values()] for row in rows]
    return json.dumps({"columns": list(rows[0]), "data": data}, ensure_ascii=False, allow_nan=False)


def baseline_metrics(candidate: Candidate) -> dict[str, float]:
    """Return the metrics of the FP16 engine's run, which MLflow charts next to its candidates under the same names."""
    metrics = {}
    for name, value in candidate.metrics.items():
        group, _, rest = name.partition("/")
        if group == "baseline":
            metrics[f"{'memory' if rest.startswith('kib') else 'perf'}/{rest}"] = value
        elif name == "noise/kl_mean":
            metrics |= {KL: value, **_logarithm(value)}
        elif name.endswith("_baseline"):
            metrics[f"{name.removesuffix('baseline')}candidate"] = value
    return {"quality/recovery": 1.0, **{name: metrics[name] for name in (*FIRST, *THEN) if name in metrics}} if metrics else {}


def _logarithm(kl: float | None) -> dict[str, float]:
    return {} if kl is None else {LOG_KL: math.log10(max(kl, MIN_KL))}


def candidate_metrics(candidate: Candidate) -> dict[str, float]:
    """Return the metrics of a candidate's run, in logging order. The baseline's metrics are in the baseline's run.

    `accuracy_loss` is added for every pair of accuracies: the lost fraction, negative for a gain.
    """
    metrics = {**candidate.metrics, **_logarithm(candidate.metrics.get(KL))}
    for name, baseline in candidate.metrics.items():
        prefix, ending, rest = name.partition("accuracy_baseline")
        accuracy = metrics.get(f"{prefix}accuracy_candidate")
        if ending and not rest and accuracy is not None:
            metrics[f"{prefix}accuracy_loss"] = baseline - accuracy
    parts = (name.split("/") for name in metrics)
    workloads = sorted({part[1] for part in parts if len(part) == 3 and part[0] == "quality" and part[2] == "kl_mean"})
    order = [*FIRST, *THEN, *(f"quality/{workload}/{name}" for workload in workloads for name in BY_WORKLOAD)]
    return {name: metrics[name] for name in [name for name in order if name in metrics][:LIMIT]}


def description(candidate: Candidate) -> str:
    """Return the description of a run and its version: verdict, figures and the first reasons, in Markdown without HTML."""
    covered = f" {candidate.covered}" if candidate.covered is not None else ""
    where = f"`{candidate.name}` on {candidate.backend}, against the FP16-KV engine"
    head = f"**{candidate.verdict}**{covered}: {where}, {'; '.join(candidate.figures)}."
    reasons = ["- " + " ".join(reason.split()).replace("<", "&lt;") for reason in candidate.reasons[:REASONS]]
    reasons += [f"- {candidate.caveat}"] if candidate.caveat is not None else []
    hidden = len(candidate.reasons) - REASONS
    reasons += [f"- and {hidden} more, in `report.html`"] if hidden > 0 else []
    return "\n\n".join(filter(None, (head, "\n".join(reasons))))


def collect_evidence(candidate: Candidate, folder: Path) -> None:
    """Copy the evidence of a version into `folder`. If `engine/` is added to the folder, stage=verify can replay the evidence.

    The user's own samples file is not copied, because prompts must not leave this machine.
    """
    identity = candidate.identity.path
    for path in (candidate.report.path, candidate.samples, identity, identity.with_name(SIGNATURE_FILE)):
        if path.is_file():
            copy_redacted(path, folder / path.name)


def copy_redacted(source: Path, target: Path) -> None:
    """Copy a text file without its secrets. HTML pages were written without secrets and are copied unchanged."""
    if source.suffix == ".html":
        shutil.copyfile(source, target)
    else:
        target.write_text(redact_text(source.read_text(encoding="utf-8")), encoding="utf-8")
