"""The gates: `decide` turns a report into PASS, FAIL or INCONCLUSIVE. It is pure and deterministic.

The samples were run in rounds, and the gates look at all samples up to a round after each one (`pipeline.statistics.looks`:
alpha spending, so that all looks together err with alpha). `decide` repeats every look up to the last round that it gets.
`is_final` says whether another round would be run.

Rules of each gate at a look (levels are one-sided and the look's own; the statistics are in `pipeline.statistics.paired` and
`pipeline.statistics.bounds`):

- Accuracy per workload, candidate - baseline, paired by sample: PASS when the exact non-inferiority test clears the level (its
  lower bound lies above -margin), FAIL when the exact inferiority test clears Holm's level over workloads (its upper bound lies
  below). PASS needs no Holm: the verdict needs every workload to pass, an intersection-union test (Berger, Technometrics 24
  (1982) 295-300), so that a single bad workload lets it pass wrongly with its own alpha at most.
  A workload that the baseline itself rarely gets right cannot show a loss: INCONCLUSIVE.
- Accuracy per context bin: FAIL by the same test, with Holm's procedure over bins. Bins are too small to demand a PASS.
- Reports in which no sample has an answer: INCONCLUSIVE below `min_samples` documents, else the distances decide alone.
- Mean KL, top-10 overlap, PPL ratio and RMS delta p per workload, by document: PASS when a bet of what PASS may err with shows
  the mean to be within its limit, where a document counts as four times the limit at most; FAIL when a bet shows it, uncut, to
  be outside. Bets need no level of a look.
- Loss of acceptance length under speculative decoding, where it was measured, per workload and drafter: as those means, of the
  log ratio of the baseline's tokens a pass to the candidate's. A drafter that met no answers is a WARNING.
- The share of ruined requests, whose mean KL is beyond four times its limit, over all workloads: PASS and FAIL by exact bounds.
- The share of tokens with a KL above `max_p999_kl`, over all workloads: FAIL by exact bounds, a WARNING when it is not shown to
  be small. So are mean distances of a few texts without answers beside samples with answers.
- The slope of the KL over context per workload: FAIL when it is clearly outside, a WARNING when it is not shown to be within.

What a PASS may err with is the attempt's share of alpha (`Gates.pass_alpha`). A FAIL of distances has alpha over their number.

What failed at any look has failed. A workload whose answers passed at any look and failed at none has passed, even where a
later look alone would be open: that is what the spent error pays for. Distances pass at the latest look only.

Rules that spend nothing, of the report as it stands:

- A planned workload of which no sample, or none with an answer, was run yet: INCONCLUSIVE.
- Completeness: FAIL where a sample is missing, doubled, lacks a finite number or is of a round that was not planned.
- Canary: FAIL unless these gates would have failed the corrupted engine. Gates that would not cannot see the cache.
- The canary's ladder: a statement of which smaller faults these gates noticed; it never fails.
- Conformance: FAIL where a request of the candidate, or of the baseline, is farther from the oracle under the same policy than
  rounding takes it (`pipeline.verdict.conformance`).
- A/A noise floor of both engines: INCONCLUSIVE where a KL threshold is not above it.
- Stress probe of both engines: FAIL where an engine deviates from the oracle on random tokens, allocates other bytes than its
  policy claims, or generates what its forced decode contradicts (`pipeline.verdict.coverage`).
- Delivered scales: FAIL where an engine of another library uses other scales than its checkpoint carries
  (`pipeline.verdict.delivery`), a WARNING where `gates.allow_scale_changes` accepts it.
- Servers by URL: INCONCLUSIVE, always, because a forced token over a reused prefix is no decoding; a lower bound of the KL
  passes nothing; without a corrupted server the canary is INCONCLUSIVE.
- Compact storage of the baseline: INCONCLUSIVE where what it misses of the mean KL is over a hundredth of the threshold.

Everything else is INCONCLUSIVE, with the number of samples that would decide the answers. A value that is missing or not finite
never passes.
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.statistics.looks import Look, planned_looks
from pipeline.verdict import answers, conformance, coverage, distances, validity
from pipeline.verdict.report import EvaluationReport, SampleRow
from pipeline.verdict.thresholds import RULES, Check, Detectable, Gates, LineStatus, Status, Verdict

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
    checks = validity.completeness(report, rows)
    if any(check.status == "FAIL" for check in checks):
        return conclude(checks, {}, looks=0, detectable={})
    answered = {name for name, has_answers in report.planned_workloads.items() if has_answers}
    gates.check_margins(answered | {row.workload for row in rows if row.judged})
    rounds = max(row.round for row in rows)
    looks = [look for look in planned_looks(report.planned_rounds, gates.max_rounds) if look.last_round <= rounds]
    seen = [_look(look, report, [row for row in rows if row.round <= look.last_round], gates) for look in looks]
    checks += validity.reuse(report.served)
    checks += validity.of_lower_bounds(_decided(seen), report.served) if seen else [_no_look(report, rounds, gates)]
    checks += validity.not_asked_yet(report, rows)
    checks += validity.noise_floor(report, gates)
    checks += validity.compaction(report, gates)
    checks += distances.canary(report, gates)
    checks += distances.ladder(report, gates)
    checks += conformance.conformance(report.conformance)
    checks += coverage.checks(report.probes)
    checks += validity.delivered_scales(report.scale_changes, gates.allow_scale_changes)
    verdict = conclude(
        *_advised(checks, rows, gates, looks), len(looks), answers.detectable(rows, gates, looks[-1]) if looks else {}
    )
    return verdict.model_copy(update={"covered": None if report.limits is None else str(report.limits)})


def is_final(verdict: Verdict, report: EvaluationReport, gates: Gates) -> bool:
    """Whether no further round is run: the candidate failed somewhere, passed everywhere, or every planned look was taken.

    What a server does not show stays open, however many samples it is asked.
    """
    stays = (validity.REUSE, "canary")
    undecided = any(check.status == "INCONCLUSIVE" and check.gate not in stays for check in verdict.checks)
    failed = verdict.status == "FAIL"
    return failed or not undecided or verdict.round >= len(planned_looks(report.planned_rounds, gates.max_rounds))


def _look(look: Look, report: EvaluationReport, rows: Sequence[SampleRow], gates: Gates) -> list[Check]:
    """Return the checks of one look at `rows`."""
    together = distances.jointly_tested(rows, len(report.drafters))
    checks = [
        *answers.accuracy(rows, gates, look),
        *answers.accuracy_by_context(report, rows, gates, look),
        *answers.acceptance(report.drafters, rows, gates, together),
        *validity.documents_without_answers(rows, gates),
        *distances.distance_by_workload(rows, gates, together),
        *distances.rare(rows, gates, look, together),
        *distances.slope_by_workload(rows, gates, look, together),
    ]
    return [check.model_copy(update={"reason": check.reason + look.place}) for check in checks]


def _advised(
    checks: Sequence[Check], rows: Sequence[SampleRow], gates: Gates, looks: Sequence[Look]
) -> tuple[list[Check], dict[str, int]]:
    """Return the checks with how many samples would decide those that are open, and these numbers by place."""
    still_open = {check.where for check in checks if (check.gate, check.status) == ("accuracy", "INCONCLUSIVE")}
    needed = answers.samples_needed(rows, still_open, gates, looks[-1]) if looks else {}
    said = [
        check.model_copy(update={"reason": check.reason + answers.advice(needed[check.where], gates)})
        if (check.gate, check.status) == ("accuracy", "INCONCLUSIVE") and check.where in needed
        else check
        for check in checks
    ]
    few = any((check.gate, check.status) == ("min_samples", "INCONCLUSIVE") for check in checks)
    return said, needed | ({"all": gates.min_samples} if few else {})


def _decided(seen: Sequence[Sequence[Check]]) -> list[Check]:
    """Return one check for each gate and place: its latest that failed, else its latest that passed, else its last.

    Only a PASS of answers lasts: what ruins later documents is no part of the distances of the earlier ones.

    Args:
        seen: The checks of each look, at least one look.
    """
    by_key: dict[tuple[str, str], list[Check]] = {}
    for checks in (seen[-1], *seen):  # the last look first, for its order; a bin may have failed at an earlier one only
        for check in checks:
            by_key.setdefault((check.gate, check.where), []).append(check)
    decided = []
    for (gate, _), history in by_key.items():
        lasting: tuple[LineStatus, ...] = ("FAIL", "PASS") if gate == "accuracy" else ("FAIL",)
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


def conclude(checks: Sequence[Check], needed: Mapping[str, int], looks: int, detectable: Mapping[str, Detectable]) -> Verdict:
    """The verdict is the worst status of its checks; its reasons are those of the checks with that status, and the
    ladder's."""
    failures = [check.reason for check in checks if check.status == "FAIL"]
    undecided = [check.reason for check in checks if check.status == "INCONCLUSIVE"]
    status: Status = "FAIL" if failures else "INCONCLUSIVE" if undecided else "PASS"
    passes = [check.reason for check in checks if check.gate == "accuracy"] or [check.reason for check in checks]
    open_places = {check.where for check in checks if check.status == "INCONCLUSIVE"}
    asks_more = status == "INCONCLUSIVE" and not open_places.isdisjoint(needed)
    return Verdict(
        status=status,
        reasons=[*(failures or undecided or passes), *(check.reason for check in checks if check.gate == distances.LADDER)],
        checks=list(checks),
        warnings=[check.reason for check in checks if check.status == "WARNING"],
        detectable=dict(detectable),
        samples_needed=dict(needed) if asks_more else {},
        round=looks,
        rules=RULES,
    )
