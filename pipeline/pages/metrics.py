"""The numbers of a candidate that its run has as metrics: few, and those first by which an engine is chosen.

MLflow compares runs by the metric that was logged first, and draws a chart of each. All numbers of a report are in
summary.json and verdict.json.
"""

import math
from collections.abc import Mapping

from pipeline.registry.summary import Candidate

LIMIT = 40
"""Metrics of a run, at most."""

KL, LOG_KL, LEAST_KL = "quality/kl_mean", "quality/kl_mean_log10", 1e-9
"""MLflow's bars have no logarithmic axis: the logarithm is a metric of its own, of LEAST_KL where the distance is smaller."""

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
    "quality/kl_slope_per_1k_tokens",
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
)
BY_WORKLOAD = ("recovery", "kl_mean", "accuracy_loss")
"""Of each kind of work, in the order of their names, as far as the limit goes."""


def with_losses(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics with the accuracy lost, as a fraction (below 0 it was gained), beside each pair of accuracies."""
    found = dict(metrics)
    for name, before in metrics.items():
        prefix, ending, rest = name.partition("accuracy_baseline")
        after = metrics.get(f"{prefix}accuracy_candidate")
        if ending and not rest and before is not None and after is not None:
            found[f"{prefix}accuracy_loss"] = before - after
    return found


def of_baseline(candidate: Candidate) -> dict[str, float]:
    """Return the metrics of the FP16 engine's run, which is a bar beside its candidates."""
    found = {name: candidate.metrics.get(source) for name, source in OF_BASELINE.items()}
    known = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    return {"quality/recovery": 1.0, **known, **_logarithm(known.get(KL))} if known else {}


def _logarithm(kl: float | None) -> dict[str, float]:
    return {} if kl is None or not math.isfinite(kl) else {LOG_KL: math.log10(max(kl, LEAST_KL))}


def chosen(candidate: Candidate) -> dict[str, float | None]:
    """Return the metrics of a candidate's run, in the order in which they are logged."""
    found = with_losses(candidate.metrics) | _logarithm(candidate.metrics.get(KL))
    parts = (name.split("/") for name in found)
    workloads = sorted({part[1] for part in parts if len(part) == 3 and part[0] == "quality" and part[2] == "kl_mean"})
    order = [*FIRST, *THEN, *(f"quality/{workload}/{name}" for workload in workloads for name in BY_WORKLOAD)]
    return {name: found[name] for name in [name for name in order if name in found][:LIMIT]}
