"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

The samples were run in rounds, and the gates look at all samples up to a round after each one (`pipeline.verdict.looks`: alpha
spending, so that all looks together err with alpha). `decide` repeats every look up to the last round that it gets.
`is_final` says whether another round would be run.

Rules of each gate at a look (levels are one-sided and the look's own; the statistics are in `pipeline.verdict.statistics`):

- Accuracy per workload, candidate - baseline, paired by sample: PASS when the exact non-inferiority test clears the level (its
  lower bound lies above -margin), FAIL when the exact inferiority test clears Holm's level over workloads (its upper bound lies
  below). PASS needs no Holm: the verdict needs every workload to pass, an intersection-union test (Berger, Technometrics 24
  (1982) 295-300), so that a single bad workload lets it pass wrongly with its own alpha at most.
  A workload that the baseline itself rarely gets right cannot show a loss: INCONCLUSIVE.
- Accuracy per context bin: FAIL by the same test, with Holm's procedure over bins. Bins are too small to demand a PASS.
- Reports in which no sample has an answer: INCONCLUSIVE below `min_samples` documents, else the distances decide alone.
- Mean KL, top-10 overlap, PPL ratio and RMS delta p per workload, bootstrap by document: PASS when the bound on the bad
  side is within the threshold, FAIL when the bound on the good side is outside. A look before the last takes ten documents.
- p99.9 of the KL over all tokens and the slope of the KL over context: FAIL when the bound on the good side is outside,
  else PASS (the other bound of a tail is its maximum, which decides nothing).

What failed at any look has failed. A workload whose answers passed at any look and failed at none has passed, even where a
later look alone would be open: that is what the spent error pays for. Distances pass at the latest look only.

Rules that spend nothing, of the report as it stands:

- A planned workload of which no sample, or none with an answer, was run yet: INCONCLUSIVE.
- Completeness: FAIL where a sample is missing, doubled, lacks a finite number or is of a round that was not planned.
- Canary: FAIL unless these gates would have failed the corrupted engine. Gates that would not cannot see the cache.
- A/A noise floor: INCONCLUSIVE where a KL threshold is not above it.
- Compact storage of the baseline: INCONCLUSIVE where what it misses of the mean KL is over a hundredth of the threshold.

Everything else is INCONCLUSIVE, with the number of samples that would decide. A value that is missing or not finite never
passes. Accuracy is the verdict where there are answers. Distances are trip-wires: their bounds are not adjusted for their
number, because their thresholds are far from what a sound engine shows.
"""

from collections.abc import Mapping, Sequence

from pipeline.verdict import answers, distances
from pipeline.verdict.looks import Look, planned_looks
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import RULES, Check, Gates, Status, Verdict


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation, or what was run of it so far.

    Args:
        report: What was measured.
        rows: The report's samples, of all rounds so far.
        gates: The thresholds.

    Raises:
        UserError: for a margin of a workload that has no answers.
    """
    checks = distances.completeness(report, rows)
    if any(check.status == "FAIL" for check in checks):
        return _conclude(checks, {}, looks=0)
    answered = {name for name, has_answers in report.planned_workloads.items() if has_answers}
    gates.check_margins(answered | {row.workload for row in rows if row.judged})
    rounds = max(row.round for row in rows)
    looks = [look for look in planned_looks(report.planned_rounds, gates.max_rounds) if look.last_round <= rounds]
    needed: dict[str, int] = {}
    seen: list[list[Check]] = []
    for look in looks:
        look_checks, needed = _look(look, report, [row for row in rows if row.round <= look.last_round], gates)
        seen.append(look_checks)
    checks += _decided(seen) if seen else [_no_look(report, rounds, gates)]
    checks += distances.not_asked_yet(report, rows)
    checks += distances.noise_floor(report, gates)
    checks += distances.compaction(report, gates)
    checks += distances.canary(report, gates)
    return _conclude(checks, needed, len(looks))


def is_final(verdict: Verdict, report: EvaluationReport, gates: Gates) -> bool:
    """Whether no further round is run: the candidate failed somewhere, passed everywhere, or every planned look was taken."""
    return verdict.status != "INCONCLUSIVE" or verdict.round >= len(planned_looks(report.planned_rounds, gates.max_rounds))


def _look(look: Look, report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> tuple[list[Check], dict[str, int]]:
    """Return the checks of one look at `rows`, and how many samples would decide each inconclusive workload."""
    checks, needed = answers.accuracy(rows, gates, look)
    checks += answers.accuracy_by_context(report, rows, gates, look)
    document_checks = distances.documents_without_answers(rows, gates)
    checks += document_checks
    needed |= {check.where: gates.min_samples for check in document_checks if check.status == "INCONCLUSIVE"}
    checks += distances.distance_by_workload(rows, gates, look)
    checks += distances.tail_and_slope(report, rows, gates, look)
    return [check.model_copy(update={"reason": check.reason + look.place}) for check in checks], needed


def _decided(seen: Sequence[Sequence[Check]]) -> list[Check]:
    """Return one check for each gate and place: its latest that failed, else its latest that passed, else its last.

    Only an exact test's PASS lasts. Distances have bootstrap bounds, which say little of the few documents of an early look.

    Args:
        seen: The checks of each look, at least one look.
    """
    by_key: dict[tuple[str, str], list[Check]] = {}
    for checks in (seen[-1], *seen):  # the last look first, for its order; a bin may have failed at an earlier one only
        for check in checks:
            by_key.setdefault((check.gate, check.where), []).append(check)
    decided = []
    for (gate, _), history in by_key.items():
        lasting: tuple[Status, ...] = ("FAIL", "PASS") if gate == "accuracy" else ("FAIL",)
        decided.append(
            next((check for status in lasting for check in reversed(history) if check.status == status), history[-1])
        )
    return decided


def _no_look(report: EvaluationReport, rounds: int, gates: Gates) -> Check:
    reason = (
        f"all: {rounds} of {len(report.planned_rounds)} rounds were run, and gates.max_rounds={gates.max_rounds} leaves one "
        "look at all of them: run the others, or judge with the gates.max_rounds of the evaluation"
    )
    return Check(gate="max_rounds", where="all", value=rounds, bound=None, threshold=None, status="INCONCLUSIVE", reason=reason)


def _conclude(checks: Sequence[Check], needed: Mapping[str, int], looks: int) -> Verdict:
    """The verdict is the worst status of its checks; its reasons are those of the checks with that status."""
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate == "accuracy"] or [check.reason for check in checks]
    open_places = {check.where for check in checks if check.status == "INCONCLUSIVE"}
    return Verdict(
        status=status,
        reasons=failures or undecided or passes,
        checks=list(checks),
        samples_needed={where: count for where, count in needed.items() if where in open_places},
        round=looks,
        rules=RULES,
    )
