"""What MLflow shows of a candidate: its run's numbers, description and tables, and the files of its model version.

MLflow compares runs by the metric that was logged first, and draws a chart of each: a run has few metrics, and those first by
which an engine is chosen. All numbers of a report are in summary.json and verdict.json.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.core.kv import POLICY_FILE
from pipeline.core.redaction import copy_redacted, redact, redact_text
from pipeline.core.scales import SCALES_FILE
from pipeline.registry.summary import DECIDED, Candidate
from pipeline.trust.signing import SIGNATURE_FILE
from pipeline.verdict.report import SampleRow

COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#bf8700"}
"""Of runs in MLflow's charts, by verdict."""
UNDECIDED = "#6e7781"
EVIDENCE_FILES = ("bundle.json", POLICY_FILE, SCALES_FILE)
REASONS = 5
"""Of a verdict, in the description; report.html has all."""
LIMIT = 40
KL, LOG_KL, LEAST_KL = "quality/kl_mean", "quality/kl_mean_log10", 1e-9
"""MLflow's bars have no logarithmic axis: the logarithm is a metric of its own, of LEAST_KL where the distance is smaller."""
"""Of the kind of work whose distance grows fastest with the context."""
FIRST = ("quality/recovery", "memory/kib_per_token", LOG_KL)
"""What the comparison opens on: the share of the probability of right answers that is kept, memory, distance."""
OF_BASELINE = {
    "memory/kib_per_token": "baseline/kib_per_token",
    KL: "noise/kl_mean",
    "quality/accuracy_candidate": "quality/accuracy_baseline",
    "perf/decode_tokens_per_s": "baseline/decode_tokens_per_s",
}
"""A candidate's metric -> that of the FP16 engine, as the candidate's report has it."""
THEN = (
    KL,
    "quality/accuracy_loss",
    "memory/max_live_tokens",
    "quality/accuracy_candidate",
    "quality/accuracy_baseline",
    "quality/ppl_ratio",
    "quality/top10_overlap",
    "quality/top1_agreement",
    "quality/rms_delta_p",
    "quality/kl_p999",
    "quality/kl_max",
    "noise/kl_mean",
    "quality/samples",
    "quality/covered_tokens",
    "quality/covered_batch",
    "perf/decode_tokens_per_s",
    "perf/time_to_first_token_ms",
    "perf/inter_token_p50_ms",
    "perf/inter_token_p99_ms",
    "baseline/kib_per_token",
    "baseline/decode_tokens_per_s",
    "quality/acceptance_lookup_candidate",
    "quality/acceptance_lookup_baseline",
    "quality/acceptance_draft_candidate",
    "quality/acceptance_draft_baseline",
    "quality/acceptance_engine_candidate",
    "quality/acceptance_engine_baseline",
)
BY_WORKLOAD = ("recovery", "kl_mean", "accuracy_loss")
"""Of each kind of work, in the order of their names, as far as the limit goes."""
OUTCOMES = {
    (True, False): "lost",
    (False, True): "gained",
    (False, False): "wrong in both",
    (True, True): "right in both",
    (None, None): "not judged",
}
"""(baseline right, candidate right) -> outcome; the table begins with what was lost."""
SHOWN = (
    "workload",
    "context_tokens",
    "reference",
    "baseline_generation",
    "candidate_generation",
    "mean_kl",
    "max_kl",
    "baseline_probability",
    "candidate_probability",
    "top10_overlap",
    "top1_agreement",
    "baseline_nll",
    "candidate_nll",
    "depth",
    "difficulty",
    "scored_tokens",
    "round",
    "document",
    "id",
)
"""Columns of the samples after the outcome: what was said stands before what was measured."""


def run_tables(candidate: Candidate, rows: Sequence[SampleRow]) -> dict[str, list[dict[str, Any]]]:
    """Return file name -> rows of what MLflow compares beside the metrics: answers and checks."""
    return {"samples.json": _samples(rows), "checks.json": [check.model_dump() for check in candidate.checks]}


def _samples(rows: Sequence[SampleRow]) -> list[dict[str, Any]]:
    """Return the samples, lost answers first, those farthest from the baseline first; without a finite KL is farthest."""

    def outcome(row: SampleRow) -> str:
        return OUTCOMES[row.baseline_correct, row.candidate_correct]

    def order(row: SampleRow) -> tuple[int, bool, float]:
        return list(OUTCOMES.values()).index(outcome(row)), row.mean_kl is not None, -(row.mean_kl or 0.0)

    return [{"answer": outcome(row), **{name: getattr(row, name) for name in SHOWN}} for row in sorted(rows, key=order)]


def of_baseline(candidate: Candidate) -> dict[str, float]:
    """Return the metrics of the FP16 engine's run, which is a bar beside its candidates."""
    known = {name: candidate.metrics[source] for name, source in OF_BASELINE.items() if source in candidate.metrics}
    return {"quality/recovery": 1.0, **known, **_logarithm(known.get(KL))} if known else {}


def _logarithm(kl: float | None) -> dict[str, float]:
    return {} if kl is None else {LOG_KL: math.log10(max(kl, LEAST_KL))}


def chosen(candidate: Candidate) -> dict[str, float]:
    """Return the metrics of a candidate's run, in the order in which they are logged.

    The accuracy lost, as a fraction (below 0 it was gained), stands beside each pair of accuracies.
    """
    found = {**candidate.metrics, **_logarithm(candidate.metrics.get(KL))}
    for name, before in candidate.metrics.items():
        prefix, ending, rest = name.partition("accuracy_baseline")
        after = found.get(f"{prefix}accuracy_candidate")
        if ending and not rest and after is not None:
            found[f"{prefix}accuracy_loss"] = before - after
    parts = (name.split("/") for name in found)
    workloads = sorted({part[1] for part in parts if len(part) == 3 and part[0] == "quality" and part[2] == "kl_mean"})
    order = [*FIRST, *THEN, *(f"quality/{workload}/{name}" for workload in workloads for name in BY_WORKLOAD)]
    return {name: found[name] for name in [name for name in order if name in found][:LIMIT]}


def description(candidate: Candidate) -> str:
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    head = f"**{candidate.verdict}**{held}: `{candidate.name}` on {candidate.backend}, against the FP16-KV engine, "
    head += f"{'; '.join(candidate.figures)}."
    reasons = [f"- {_plain(reason)}" for reason in candidate.reasons[:REASONS]]
    left = len(candidate.reasons) - REASONS
    reasons += [f"- and {left} more, in `report.html`"] if left > 0 else []
    return "\n\n".join(part for part in (head, "\n".join(reasons)) if part)


def _plain(text: str) -> str:
    """Return text in one line that is no markup."""
    return " ".join(text.split()).replace("<", "&lt;")


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
    (folder / "verdict.json").write_text(json.dumps(redact(verdict), indent=2, allow_nan=False), encoding="utf-8")
