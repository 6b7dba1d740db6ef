"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

Rules of each gate (alpha is one-sided; the statistics are in `pipeline.verdict.statistics`):

- Accuracy per workload, candidate - baseline, paired by sample: PASS when the exact non-inferiority test clears Holm's
  level (its lower bound lies above -margin), FAIL when the exact inferiority test does (its upper bound lies below).
  A workload that the baseline itself rarely gets right cannot show a loss: INCONCLUSIVE.
- Accuracy per context bin: FAIL by the same test, with Holm's procedure over bins. Bins are too small to demand a PASS.
- Reports in which no sample has an answer: INCONCLUSIVE below `min_samples` documents, else the distances decide alone.
- Mean KL, top-10 overlap, PPL ratio and RMS delta p per workload, bootstrap by document: PASS when the bound on the bad
  side is within the threshold, FAIL when the bound on the good side is outside.
- p99.9 of the KL over all tokens and the slope of the KL over context: FAIL when the bound on the good side is outside,
  else PASS (the other bound of a tail is its maximum, which decides nothing).
- Canary: FAIL unless these gates would have failed the corrupted engine. Gates that would not cannot see the cache.
- A/A noise floor: INCONCLUSIVE where a KL threshold is not above it.

Everything else is INCONCLUSIVE, with the number of samples that would decide. A value that is missing or not finite never
passes. Accuracy is the verdict where there are answers. Distances are trip-wires: their bounds are not adjusted for their
number, because their thresholds are far from what a sound engine shows.
"""

from collections.abc import Mapping, Sequence

from pipeline.verdict import answers, distances
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Check, Gates, Status, Verdict


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation.

    Args:
        report: What was measured.
        rows: The report's samples.
        gates: The thresholds.

    Raises:
        UserError: for a margin of a workload that has no answers.
    """
    checks = distances.completeness(report, rows)
    needed: dict[str, int] = {}
    if not any(check.status == "FAIL" for check in checks):
        gates.check_margins({row.workload for row in rows if row.judged})
        accuracy_checks, needed = answers.accuracy(rows, gates)
        checks += accuracy_checks
        checks += answers.accuracy_by_context(report, rows, gates)
        document_checks = distances.documents_without_answers(rows, gates)
        checks += document_checks
        needed |= {check.where: gates.min_samples for check in document_checks if check.status == "INCONCLUSIVE"}
        checks += distances.distance_by_workload(rows, gates)
        checks += distances.tail_and_slope(report, rows, gates)
        checks += distances.noise_floor(report, gates)
        checks += distances.canary(report, gates)
    return _conclude(checks, needed)


def _conclude(checks: Sequence[Check], needed: Mapping[str, int]) -> Verdict:
    """The verdict is the worst status of its checks; its reasons are those of the checks with that status."""
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate == "accuracy"] or [check.reason for check in checks]
    return Verdict(status=status, reasons=failures or undecided or passes, checks=list(checks), samples_needed=dict(needed))
