"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

A gate is a file of this folder: what it adds to the thresholds (`gates.*` on the command line), what it calls its lines, and
the function that writes them (`pipeline.verdict.registry`). To add one, add a file, and a row to the table of docs/verdict.md.

The samples were run in rounds, and the gates look at all samples up to a round after each one (`pipeline.statistics.looks`:
alpha spending, so that all looks together err with alpha). `decide` repeats every look up to the last round that it gets.
`is_final` says whether another round would be run. Levels are one-sided and the look's own. What a PASS may err with is the
attempt's share of alpha (`Limits.pass_alpha`); PASS needs no Holm, because the verdict needs every gate to pass, an
intersection-union test (Berger, Technometrics 24 (1982) 295-300).

What failed at any look has failed. Other gates judge the report as it stands, and spend nothing. A value that is missing or
not finite never passes.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from pydantic import create_model

from pipeline import statistics
from pipeline.verdict.registry import GATES, LINES, Evidence, Gate, Needed
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import MOST_SAMPLES, RULES, Check, Status, Verdict

__all__ = ["GATES", "LINES", "Decide", "Gates", "conclude", "decide", "is_final"]

for _module in pkgutil.iter_modules(__path__):
    __import__(f"{__name__}.{_module.name}")

if TYPE_CHECKING:
    from pipeline.verdict.gates import answers, delivery, rare, recovery

    class Gates(answers.Limits, recovery.Limits, rare.Limits, delivery.Limits):
        """The thresholds that are read outside of their gates."""

else:
    _limits = dict.fromkeys(gate.limits for gate in reversed(GATES))
    _widest = (one for one in _limits if not any(issubclass(other, one) and other is not one for other in _limits))
    Gates = create_model("Gates", __base__=tuple(_widest), __module__=__name__)
    Gates.__doc__ = "The thresholds of all gates, `gates.*` on the command line."

Decide = Callable[[EvaluationReport, Sequence[SampleRow]], Verdict]
"""The gates, bound to their thresholds."""


def decide(report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> Verdict:
    """Judge one evaluation, or what was run of it so far.

    Args:
        report: What was measured.
        rows: The report's samples, of all rounds so far.
        gates: The thresholds.

    Raises:
        UserError: for a margin of a workload that has no answers.
    """
    rounds = max((row.round for row in rows), default=0)
    planned = statistics.looks.planned_looks(report.planned_rounds, gates.max_rounds)
    looks = [look for look in planned if look.last_round <= rounds]
    whole = Evidence(report, rows, (looks or planned)[-1])
    checks: list[Check] = []
    for looking, group in groupby(GATES, key=lambda gate: gate.looks):
        some = list(group)
        if looking:
            answered = {name for name, has_answers in report.planned_workloads.items() if has_answers}
            gates.check_margins(answered | {row.workload for row in whole.judged})
            seen = [_look(some, replace(whole, look=look), gates) for look in looks]
            checks += _decided(seen) if seen else [_no_look(report, rounds, gates)]
            continue
        for gate in some:
            checks += gate.check(whole, gates)
            if gate.stops and any(check.status == "FAIL" for check in checks):
                return conclude(checks, {}, looks=0)
    needed: dict[str, int] = {}
    for gate in GATES if looks else ():
        if gate.needed is not None:
            checks, numbers = _advised(checks, gate, gate.needed, whole, gates)
            needed |= {where: max(count, needed.get(where, 0)) for where, count in numbers.items()}
    verdict = conclude(checks, needed, len(looks))
    return verdict.model_copy(update={"covered": None if report.limits is None else str(report.limits)})


def is_final(verdict: Verdict, report: EvaluationReport, gates: Gates) -> bool:
    """Whether no further round is run: the candidate failed somewhere, passed everywhere, or every planned look was taken."""
    open_lines = [check.gate for check in verdict.checks if check.status == "INCONCLUSIVE"]
    undecided = any(name not in LINES or LINES[name].samples_decide for name in open_lines)
    looks = statistics.looks.planned_looks(report.planned_rounds, gates.max_rounds)
    return verdict.status == "FAIL" or not undecided or verdict.round >= len(looks)


def _look(some: Sequence[Gate], whole: Evidence, gates: Gates) -> list[Check]:
    """Return the checks of one look."""
    rows = [row for row in whole.rows if row.round <= whole.look.last_round]
    together = sum(gate.tests(whole.report, rows) for gate in some if gate.tests is not None)
    evidence = replace(whole, rows=rows, together=together)
    checks = [check for gate in some for check in gate.check(evidence, gates)]
    return [check.model_copy(update={"reason": check.reason + whole.look.place}) for check in checks]


def _decided(seen: Sequence[Sequence[Check]]) -> list[Check]:
    """Return one check for each line and place: its latest that failed, else that of the last look."""
    decided: dict[tuple[str, str], Check] = {(check.gate, check.where): check for check in seen[-1]}
    for checks in seen:
        decided |= {(check.gate, check.where): check for check in checks if check.status == "FAIL"}
    return list(decided.values())


def _no_look(report: EvaluationReport, rounds: int, gates: Gates) -> Check:
    reason = (
        f"all: {rounds} of {len(report.planned_rounds)} rounds were run, and gates.max_rounds={gates.max_rounds} leaves one "
        "look at all of them: run the others, or judge with the gates.max_rounds of the evaluation"
    )
    return Check(gate="max_rounds", where="all", value=rounds, status="INCONCLUSIVE", reason=reason)


def _advised(
    checks: Sequence[Check], gate: Gate, samples: Needed[Gates], whole: Evidence, gates: Gates
) -> tuple[list[Check], Mapping[str, int]]:
    """Return the checks with how many samples would decide the open ones of a gate, and these numbers by place."""
    still_open = {check.where for check in checks if check.gate in gate.lines and check.status == "INCONCLUSIVE"}
    needed = samples(whole, gates, still_open)
    if not gate.is_main:
        return list(checks), needed
    attempt = gates.next_attempt.attempt

    def said(check: Check) -> Check:
        count = needed.get(check.where, sum(needed.values()) if check.where == "all" else 0)
        if check.gate not in gate.lines or check.status != "INCONCLUSIVE" or not count:
            return check
        amount = f"{count:,}" if count < MOST_SAMPLES else "over a million"
        advice = f"; about {amount} samples would decide with gates.attempt={attempt}"
        return check.model_copy(update={"reason": check.reason + advice})

    return [said(check) for check in checks], needed


def conclude(checks: Sequence[Check], needed: Mapping[str, int], looks: int) -> Verdict:
    """The verdict is the worst status of its checks; its reasons are those of the checks with that status, and what every
    verdict says."""
    main = {key for gate in GATES if gate.is_main for key in gate.lines}
    always = {key for key, line in LINES.items() if line.always_said}
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate in main] or [check.reason for check in checks]
    return Verdict(
        status=status,
        reasons=[*(failures or undecided or passes), *(check.reason for check in checks if check.gate in always)],
        checks=list(checks),
        warnings=[check.reason for check in checks if check.status == "WARNING"],
        samples_needed=dict(needed) if status == "INCONCLUSIVE" else {},
        round=looks,
        rules=RULES,
    )
