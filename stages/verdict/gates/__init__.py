"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

To add a gate, add a function to a file of this folder, its lines to GATES, and a row to the table of docs/verdict.md.

Samples run in rounds. After every round, all figures are tested on the samples of all rounds until then; such a test is a look.
A bet is valid at every look (`stages.verdict.statistics.bets`), while Student's t is used only at the last planned look. A PASS
needs every gate, so no gate's level is corrected for the others (an intersection-union test: Berger, Technometrics 24 (1982)
295-300). FAILs share alpha: the figures of recovery get one half, all others the other half (Bonferroni).

A figure that fails at any look has failed. Gates without figures judge the complete report. A value that is missing or not
finite never passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from stages.verdict.gate import Gate, GateInput, Line
from stages.verdict.gates import (
    acceptance,
    answers,
    conformance,
    delivery,
    distances,
    evaluation,
    must_fail_control,
    pressure,
    stress_test,
)
from stages.verdict.gates.recovery import RECOVERY, needed, recovery
from stages.verdict.report import EvaluationReport, SampleRow
from stages.verdict.thresholds import MOST_SAMPLES, RULES, Check, Gates, Status, Verdict

__all__ = ["GATES", "LINES", "Decide", "Gates", "conclude", "decide", "is_final"]

Decide = Callable[[EvaluationReport, Sequence[SampleRow]], Verdict]
"""The function `decide`, bound to its thresholds."""

_CUT = "; but for a FAIL, a document counts as three times the limit at most"
GATES = (
    Gate({"complete": Line("Complete", "nothing where all samples are whole", per="all")}),
    Gate(
        {RECOVERY: Line("Recovery", "share of the probability of right answers that is kept", per="workload", equal=1.0)},
        figures=recovery,
    ),
    Gate(
        {answers.ACCURACY: Line("Right answers", "points that the policy gains or loses against FP16", per="workload")},
        figures=answers.accuracy,
    ),
    Gate(
        {acceptance.KEY: Line("Acceptance loss", "share of the tokens a pass under speculative decoding", per="workload")},
        figures=acceptance.acceptance,
        check=acceptance.unmeasured,
    ),
    Gate(
        {
            evaluation.MIN_SAMPLES: Line(
                "Documents", "per planned workload; if no question has an answer, over all workloads", per="all"
            )
        },
        check=evaluation.documents,
    ),
    Gate(
        {
            "max_mean_kl": Line("Mean KL", f"nats per token from FP16{_CUT}", per="workload"),
            "min_top10_overlap": Line(
                "Top-10 overlap", f"share of the ten most likely tokens that both agree on{_CUT}", per="workload", equal=1.0
            ),
            "max_ppl_ratio": Line("Perplexity ratio", f"the policy's over that of FP16{_CUT}", per="workload", equal=1.0),
        },
        figures=distances.distances,
    ),
    Gate(
        {
            "max_ruined_share": Line("Ruined requests", "share whose mean KL is beyond three times its limit", per="all"),
            "max_p999_kl": Line("Far tokens", "share of the tokens with a KL above gates.max_p999_kl", per="all"),
        },
        figures=distances.rare,
    ),
    Gate({"noise_floor": Line("A/A noise", "distance of an engine from itself", per="engine")}, check=evaluation.noise_floor),
    Gate(
        {
            "must_fail_control": Line(
                "Must-fail control",
                "mean KL of the policy with corrupted key scales, which has to be noticed",
                per="engine",
                samples_decide=False,
            )
        },
        check=must_fail_control.must_fail_control,
    ),
    Gate(
        {"conformance": Line("Conformance", "distance from the reference engine, as a share of rounding", per="engine")},
        check=conformance.conformance,
    ),
    Gate(
        {
            "stress_test": Line(
                "Stress test", "sequences of random tokens that deviate from the reference engine", per="engine"
            ),
            "allocation": Line("Allocation", "bytes that differ from the policy's", per="engine"),
            "free_answers": Line("Free answers", "samples whose free answer contradicts the forced one", per="engine"),
            "reused_prefixes": Line("Reused prefixes", "samples that differ over reused prefixes", per="engine"),
        },
        check=stress_test.stress_test,
    ),
    Gate(
        {"scale_delivery": Line("Delivered scales", "scales that are not the checkpoint's", per="engine")},
        check=delivery.scale_delivery,
    ),
    Gate(
        {"pressure": Line("Full pool", "requests that a full pool changes beyond noise", per="engine", samples_decide=False)},
        check=pressure.pressure,
    ),
    Gate(
        {"takes_effect": Line("Long enough", "tokens of the longest sample", per="all", samples_decide=False)},
        check=evaluation.takes_effect,
    ),
)
"""All gates, in the order of a verdict's lines. If `complete` fails, no other gate is judged."""
LINES: Mapping[str, Line] = {key: line for gate in GATES for key, line in gate.lines.items()}
"""All kinds of lines by key."""


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation, complete or after some of its rounds.

    Args:
        report: The measurements.
        rows: The report's samples, from all rounds that ran.
        gates: The thresholds.
    """
    whole = GateInput(report, rows)
    problems = list(evaluation.complete(whole, gates))
    if problems:
        return conclude(problems, {}, looks=0)
    failed: dict[tuple[str, str], Check] = {}
    looks = max(row.round for row in rows)
    for number in range(1, looks + 1):
        evidence = replace(whole, rows=[row for row in rows if row.round <= number])
        found = {(check.gate, check.where): check for check in _look(evidence, gates, number)}
        failed |= {place: check for place, check in found.items() if check.status == "FAIL"}
    figures = list((found | failed).values())
    checks = [
        check
        for gate in GATES
        for check in (*(one for one in figures if one.gate in gate.lines), *(gate.check(whole, gates) if gate.check else ()))
    ]
    checks, numbers = _advised(checks, whole, gates)
    verdict = conclude(checks, numbers, looks)
    return verdict.model_copy(update={"covered": None if report.limits is None else str(report.limits)})


def is_final(verdict: Verdict, report: EvaluationReport) -> bool:
    """Return whether to stop: a gate failed, all gates passed, more samples would not help, or no planned look is left."""
    open_lines = [check.gate for check in verdict.checks if check.status == "INCONCLUSIVE"]
    undecided = any(name not in LINES or LINES[name].samples_decide for name in open_lines)
    return verdict.status == "FAIL" or not undecided or verdict.round >= len(report.planned_rounds)


def _look(evidence: GateInput, gates: Gates, number: int) -> Iterator[Check]:
    """Yield the lines of all figures at the look after round `number`."""
    rounds = len(evidence.report.planned_rounds)
    place = f"; round {number} of {rounds}" if rounds > 1 else ""
    figures = [figure for gate in GATES if gate.figures is not None for figure in gate.figures(evidence, gates)]
    main = sum(figure.gate == RECOVERY for figure in figures)
    for figure in figures:
        together = main if figure.gate == RECOVERY else len(figures) - main
        result = figure.test(gates.alpha / 2 / together, gates, last=number == rounds)
        if figure.must_pass or result.decision == "FAIL":
            check = figure.check(result, gates)
            yield check.model_copy(update={"reason": check.reason + place})


def _advised(checks: Sequence[Check], whole: GateInput, gates: Gates) -> tuple[list[Check], dict[str, int]]:
    """Return the checks with advice in their reasons, and the number of samples by workload that would decide recovery."""
    still_open = {check.where for check in checks if check.gate == RECOVERY and check.status == "INCONCLUSIVE"}
    numbers = needed(whole, gates, still_open)
    if any(check.gate == evaluation.MIN_SAMPLES and check.where == "all" and check.status != "PASS" for check in checks):
        numbers["all"] = gates.min_samples

    def said(check: Check) -> Check:
        count = numbers.get(check.where, sum(numbers.values()) if check.where == "all" else 0)
        if check.gate != RECOVERY or check.status != "INCONCLUSIVE" or not count:
            return check
        amount = f"{count:,}" if count < MOST_SAMPLES else "over a million"
        advice = f"; about {amount} samples would decide with gates.attempt={gates.next_attempt.attempt}"
        return check.model_copy(update={"reason": check.reason + advice})

    return [said(check) for check in checks], numbers


def conclude(checks: Sequence[Check], numbers: Mapping[str, int], looks: int) -> Verdict:
    """Return the verdict: the worst status of all checks, with the reasons of the checks that have this status."""
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate == RECOVERY] or [check.reason for check in checks]
    return Verdict(
        status=status,
        reasons=failures or undecided or passes,
        checks=list(checks),
        warnings=[check.reason for check in checks if check.status == "WARNING"],
        samples_needed=dict(numbers) if status == "INCONCLUSIVE" else {},
        round=looks,
        rules=RULES,
    )
