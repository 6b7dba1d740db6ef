"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. Pure and deterministic.

What each gate uses (alpha one-sided, statistics in `pipeline.verdict.statistics`):

- Accuracy per workload, candidate - baseline, paired by sample: PASS when the exact non-inferiority test clears Holm's
  level (its lower bound lies above -margin), FAIL when the exact inferiority test does (its upper bound lies below).
  A workload that the baseline itself rarely gets right shows no loss: INCONCLUSIVE.
- Accuracy per context bin: FAIL in the same way, Holm over bins; bins are small and are never asked for a PASS.
- Reports in which no sample has an answer: INCONCLUSIVE below `min_samples` documents, else the distances decide alone.
- Mean KL, top-10 overlap, PPL ratio and RMS delta p per workload, bootstrap by document: PASS when the bound on the bad
  side is within the threshold, FAIL when the bound on the good side is outside.
- p99.9 of the KL over all tokens and the slope of the KL over context: FAIL when the good side's bound is outside, else
  PASS (the other bound of a tail is its maximum, which decides nothing).
- Canary: FAIL unless these gates would have failed the corrupted engine: then they cannot see the cache.
- A/A noise floor: a KL threshold that is not above it decides nothing.

Everything else is INCONCLUSIVE, with the number of samples that would decide. What is missing or not a finite number
never passes. Accuracy is the verdict where there are answers; distances are trip-wires, and their bounds are not adjusted
for how many there are: their thresholds are far from what a sound engine shows.
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.verdict import answers, distances
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates, Status, Verdict


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation. `rows` are the report's samples.

    Raises:
        UserError: for a margin of a workload that has no answers.
    """
    checks = distances.completeness(report, rows)
    needed: dict[str, int] = {}
    if not any(check.status == "FAIL" for check in checks):
        gates.check_margins({row.workload for row in rows if row.judged})
        judged, needed = answers.accuracy(rows, gates)
        checks += judged
        checks += answers.accuracy_by_bin(report, rows, gates)
        unjudged = distances.evidence(rows, gates)
        checks += unjudged
        needed |= {check.where: gates.min_samples for check in unjudged if check.status == "INCONCLUSIVE"}
        checks += distances.fidelity(rows, gates)
        checks += distances.tail_and_slope(report, rows, gates)
        checks += distances.noise(report, gates)
        checks += distances.canary(report, gates)
    return _conclude(checks, needed)


def _conclude(checks: Sequence[Check], needed: Mapping[str, int]) -> Verdict:
    by_status: Callable[[Status], list[str]] = lambda status: [c.reason for c in checks if c.status == status]  # noqa: E731
    failed, open_ = by_status("FAIL"), by_status("INCONCLUSIVE")
    status: Status = "FAIL" if failed else "INCONCLUSIVE" if open_ else "PASS"
    shown = [check.reason for check in checks if check.gate == "accuracy"] or [check.reason for check in checks]
    return Verdict(status=status, reasons=failed or open_ or shown, checks=list(checks), samples_needed=dict(needed))
