"""The decision of all gates on a report: PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

Samples run in rounds. After every round, all figures are tested on the samples of all rounds until then; such a test is a look.
A bet is valid at every look (`stages.verdict.bets`), while Student's t is used only at the last planned look. A PASS
needs every gate, so no gate's level is corrected for the others (an intersection-union test: Berger, Technometrics 24 (1982)
295-300). FAILs share ALPHA: the figures of recovery get one half, all others the other half (Bonferroni). The shares are equal
and the same at every look, so figures that appear in a later round count from the first look on.

A figure that fails at any look has failed. The functions in CHECKS judge the complete report once. A value that is missing or
not finite never passes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from stages.verdict.figures import MIN_SOUND_REQUESTS, Figure, GateInput
from stages.verdict.gates import answers, checks, distances
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.verdict import ALL, ALPHA, MAX_SAMPLES, Check, Gate, Status, Thresholds, Verdict

FIGURES: tuple[Callable[[GateInput, Thresholds], Iterable[Figure]], ...] = (
    answers.recovery,
    answers.accuracy,
    answers.acceptance,
    distances.mean_distances,
    distances.outlier_shares,
)
"""Functions that yield the figures. Figures are tested after every round."""
CHECKS: tuple[Callable[[GateInput, Thresholds], Iterable[Check]], ...] = (
    answers.unmeasured_acceptance,
    checks.documents,
    checks.noise_floor,
    distances.must_fail_control,
    checks.conformance,
    checks.stress_test,
    checks.scale_delivery,
    checks.full_pool,
    checks.takes_effect,
)
"""Functions that yield the checks of the complete report, after all rounds that ran."""


def decide(report: EvaluationReport, rows: Sequence[SampleRow], thresholds: Thresholds) -> Verdict:
    """Judge one evaluation, complete or after some of its rounds. `rows` are the samples of all rounds that ran."""
    everything = GateInput(report, rows)
    problems = list(checks.completeness(everything))
    if problems:
        return conclude(problems, 0, looks=0)
    failed: dict[tuple[str, str], Check] = {}
    looks = max(row.round for row in rows)
    for number in range(1, looks + 1):
        evidence = replace(everything, rows=[row for row in rows if row.round <= number])
        latest = {(check.gate, check.where): check for check in _look(evidence, thresholds, number)}
        failed |= {place: check for place, check in latest.items() if check.status == "FAIL"}
    lines = [*(latest | failed).values(), *(check for run_checks in CHECKS for check in run_checks(everything, thresholds))]
    order = [gate.value for gate in Gate]
    lines.sort(key=lambda check: order.index(check.gate))
    later = thresholds.next_attempt
    verdict = conclude(lines, 0 if later is None else _samples_needed(lines, everything, later), looks)
    return verdict.model_copy(update={"covered": None if report.limits is None else str(report.limits)})


def fails_questions(report: EvaluationReport, rows: Sequence[SampleRow], thresholds: Thresholds) -> bool:
    """Return whether the samples alone decide on FAIL, whatever the tests of the engine show. `rows` as in `decide`."""
    evidence = GateInput(report, rows)
    if any(checks.completeness(evidence)):
        return True
    return any(check.status == "FAIL" for check in _look(evidence, thresholds, max(row.round for row in rows)))


def is_final(verdict: Verdict, report: EvaluationReport) -> bool:
    """Return whether to stop: a gate failed, all gates passed, more samples would not help, or no planned look is left."""
    undecided = any(check.gate.samples_decide for check in verdict.checks if check.status == "INCONCLUSIVE")
    return verdict.status == "FAIL" or not undecided or verdict.round >= report.planned_rounds


def _look(evidence: GateInput, thresholds: Thresholds, number: int) -> Iterator[Check]:
    rounds = evidence.report.planned_rounds
    place = f"; round {number} of {rounds}" if rounds > 1 else ""
    figures = [figure for get_figures in FIGURES for figure in get_figures(evidence, thresholds)]
    sharing = _figures_sharing(evidence.report, figures)
    for figure in figures:
        level = ALPHA / 2 / sharing[figure.gate == Gate.RECOVERY]
        result = figure.test(level, thresholds.pass_alpha, last=number == rounds)
        if figure.must_pass or result.decision == "FAIL":
            check = figure.check(result)
            yield check.model_copy(update={"reason": check.reason + place})


def _figures_sharing(report: EvaluationReport, figures: Sequence[Figure]) -> dict[bool, int]:
    """Return how many figures of all planned rounds share one half of ALPHA: of recovery (True), and of other gates (False).

    If the report does not record its plan, the figures of the look count.
    """
    recoveries = sum(figure.gate == Gate.RECOVERY for figure in figures)
    workloads, judged = len(report.planned_workloads), sum(report.planned_workloads.values())
    answers_and_drafts = judged * (1 + len(report.drafters)) + report.planned_bins
    others = answers_and_drafts + 2 * workloads + 2  # two distances of every workload, and two shares over all requests
    return {True: max(1 + judged, recoveries), False: max(others, len(figures) - recoveries)}


def _samples_needed(checks: Sequence[Check], evidence: GateInput, later: Thresholds) -> int:
    """Return the number of samples that would decide the next attempt. `later`: thresholds of that attempt."""
    still_open = {check.where for check in checks if check.gate == Gate.RECOVERY and check.status == "INCONCLUSIVE"}
    needed = math.ceil(len(evidence.rows) * answers.times_needed(evidence, later, still_open))
    for check in checks:
        if check.gate == Gate.RUINED and check.status == "INCONCLUSIVE" and not check.value:
            needed = max(needed, MIN_SOUND_REQUESTS)
        if check.gate == Gate.MIN_SAMPLES and check.where == ALL and check.status != "PASS":
            needed = max(needed, later.min_samples)
    return min(needed, MAX_SAMPLES) if needed > len(evidence.rows) else 0


def conclude(checks: Sequence[Check], samples_needed: int, looks: int) -> Verdict:
    """Return the verdict with the worst status of all checks. A PASS gives only the reasons on recovery, if there are any."""
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate == Gate.RECOVERY] or [check.reason for check in checks]
    return Verdict(
        status=status,
        reasons=failures or undecided or passes,
        checks=list(checks),
        warnings=[check.reason for check in checks if check.status == "WARNING"],
        samples_needed=samples_needed if status == "INCONCLUSIVE" else 0,
        round=looks,
    )
