"""Group-sequential looks: their levels against the literature, and what several rounds mean for a verdict."""

import math

import numpy as np
import pytest
from gate_reports import (
    CANARY_ROWS,
    CLASSES,
    GATES,
    answered,
    every_class,
    gates,
    in_rounds,
    lines,
    prose,
    report,
    row,
    verdict,
)
from pydantic import ValidationError
from scipy.stats import multivariate_normal, norm

from pipeline.statistics.looks import Spending, nominal_levels, obrien_fleming_spending, planned_looks, square_root_spending
from pipeline.verdict.gates import decide, is_final
from pipeline.verdict.report import Canary, SampleRow
from pipeline.verdict.thresholds import RULES, Verdict

PLAN = [0.1, 0.25, 0.5, 0.75, 1.0]
SPENDING = [obrien_fleming_spending, square_root_spending]


def up_to(rows: list[SampleRow], last: int, **changes: object) -> Verdict:
    """The verdict on the rounds up to `last` of an evaluation in rounds."""
    rows = [r for r in in_rounds(rows, PLAN) if r.round <= last]
    return verdict(rows, gates(**changes), planned_rounds=PLAN)


def stops(rows: list[SampleRow]) -> tuple[str, int]:
    """The verdict of an evaluation that stops once it is decided, and the rounds that it took."""
    numbered = in_rounds(rows, PLAN)
    for last in range(1, len(PLAN) + 1):
        seen = [r for r in numbered if r.round <= last]
        judged = report(seen, planned_rounds=PLAN)
        outcome = decide(judged, seen, GATES)
        if is_final(outcome, judged, GATES):
            return outcome.status, last
    raise AssertionError("the last look is final")


def flipping(workload: str, count: int, lost: set[int]) -> list[SampleRow]:
    return [row(workload, i, after=i not in lost) for i in range(count)]


def keeping(share: float, rows: list[SampleRow], spread: float = 0.0) -> list[SampleRow]:
    """The rows, of whose probability of right answers the candidate keeps a share, `spread` more and less by turns."""
    shares = [share + (-spread if i % 2 else spread) for i in range(len(rows))]
    return [
        r.model_copy(update={"candidate_probability": kept * (r.baseline_probability or 0.0)})
        for kept, r in zip(shares, rows, strict=True)
    ]


def test_levels_are_the_published_boundaries_of_lan_and_demets() -> None:
    shares = (0.2, 0.4, 0.6, 0.8, 1.0)
    levels = nominal_levels(shares, 0.025, obrien_fleming_spending)
    assert norm.isf(levels) == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)


@pytest.mark.parametrize("spending", SPENDING)
@pytest.mark.parametrize("alpha", [0.05, 0.0125])
@pytest.mark.parametrize("shares", [tuple(PLAN), (0.5, 0.51, 1.0)], ids=["the plan", "a narrow step"])
def test_all_looks_together_err_with_alpha_by_scipys_normal_distribution_too(
    spending: Spending, alpha: float, shares: tuple[float, ...]
) -> None:
    levels = nominal_levels(shares, alpha, spending)
    covariance = [[math.sqrt(min(s, t) / max(s, t)) for t in shares] for s in shares]
    joint = multivariate_normal(np.zeros(len(shares)), covariance, seed=1)
    assert 1 - joint.cdf(norm.isf(levels)) == pytest.approx(alpha, abs=5e-4)


@pytest.mark.parametrize("spending", SPENDING)
def test_one_look_spends_all_of_alpha_to_the_last_bit(spending: Spending) -> None:
    assert nominal_levels((1.0,), 0.05, spending) == (0.05,)


@pytest.mark.parametrize(
    ("most", "rounds", "shares"),
    [(1, [5], (1.0,)), (2, [1, 5], (0.1, 1.0)), (3, [1, 2, 5], (0.1, 0.25, 1.0)), (5, [1, 2, 3, 4, 5], tuple(PLAN)),
     (20, [1, 2, 3, 4, 5], tuple(PLAN))],
)  # fmt: skip
def test_a_plan_that_is_cut_keeps_its_first_looks_and_the_one_at_all_samples(
    most: int, rounds: list[int], shares: tuple[float, ...]
) -> None:
    looks = planned_looks(PLAN, most)
    assert [look.last_round for look in looks] == rounds
    assert {look.shares for look in looks} == {shares}


@pytest.mark.parametrize("kept", [1.0, 0.96, 0.9])
def test_one_round_is_the_test_of_a_fixed_number_of_samples(kept: float) -> None:
    rows = keeping(kept, answered("copy", 160))
    outcome = verdict(rows)
    assert outcome == verdict(rows, gates(max_rounds=1))
    assert not any("round" in reason for reason in outcome.reasons)
    # a plan that gates.max_rounds=1 leaves one look of is the same test once all of it was run
    planned = verdict(in_rounds(rows, PLAN), gates(max_rounds=1), planned_rounds=PLAN)
    assert planned == outcome


def test_a_broken_engine_is_refused_after_the_first_round() -> None:
    rows = flipping("copy", 160, lost=set(range(0, 160, 3)) | set(range(1, 160, 3))) + answered("retrieval", 160)
    assert stops(rows) == ("FAIL", 1)
    first = up_to(rows, 1)
    assert first.reasons[0].startswith("copy: 11 of 16 answers lost, 0 gained")
    assert first.reasons[0].endswith("; round 1 of 5")


def test_a_sound_engine_passes_as_soon_as_60_samples_were_run() -> None:
    rows = answered("copy", 160) + answered("retrieval", 160)
    assert stops(rows) == ("PASS", 2)
    assert up_to(rows, 1).status == "INCONCLUSIVE"
    second = up_to(rows, 2)
    assert second.round == 2
    assert all(reason.endswith("; round 2 of 5") for reason in second.reasons if "probability" in reason)


def test_what_passed_at_an_early_look_does_not_pass_for_good() -> None:
    rows = [r if i < 80 else keeping(0.93, [r])[0] for i, r in enumerate(answered("copy", 800))]
    assert up_to(rows, 1).status == "PASS"
    assert up_to(rows, 5).status != "PASS"


def test_a_distance_does_not_pass_for_good_at_an_early_look() -> None:
    """Where only later rounds hold the documents that the cache ruins."""
    early, late = prose(300, round=1, mean_kl=0.001), prose(340, round=2, mean_kl=1.0)[300:]
    assert verdict(early, planned_rounds=[0.5, 1.0]).status == "PASS"
    assert verdict(early + late, planned_rounds=[0.5, 1.0]).status != "PASS"


def test_what_failed_at_an_earlier_look_has_failed_whatever_came_later() -> None:
    rows = flipping("copy", 160, lost=set(range(16)))
    assert up_to(rows, 1).status == "FAIL"
    assert up_to(rows, 5).status == "FAIL"


def test_a_plan_that_is_used_up_without_a_decision_is_inconclusive_and_final() -> None:
    rows = keeping(0.953, answered("copy", 120), spread=0.1)
    assert stops(rows) == ("INCONCLUSIVE", 5)
    assert up_to(rows, 5).samples_needed["copy"] > 120


@pytest.mark.parametrize(
    ("documents", "spread", "status"), [(36, 0.015, "PASS"), (35, 0.015, "INCONCLUSIVE"), (36, 0.1, "INCONCLUSIVE")]
)
def test_many_documents_show_by_student_s_t_what_a_bet_leaves_open(documents: int, spread: float, status: str) -> None:
    (check,) = lines("min_recovery", report(rows := keeping(0.96, answered("copy", documents), spread)), rows)[:1]
    assert check.status == status
    assert (check.bound or 0.0) < 0.96


@pytest.mark.parametrize("doubled", [False, True])
def test_what_samples_do_not_decide_stops_after_the_first_round(doubled: bool) -> None:
    seen = [r for r in in_rounds(answered("copy", 160), PLAN) if r.round == 1]
    changes = {} if doubled else {"canary": Canary(factor=0.1, rows=[])}
    judged = report([*seen, seen[0]] if doubled else seen, planned_rounds=PLAN, **changes)
    outcome = decide(judged, seen, GATES)
    assert outcome.status == "FAIL"
    assert is_final(outcome, judged, GATES)


def test_samples_of_a_round_that_was_not_planned_fail() -> None:
    rows = in_rounds(answered("copy", 160), PLAN)
    outcome = verdict(rows)
    assert outcome.reasons == ["all: samples are of round 2, 1 were planned"]
    assert outcome.status == "FAIL"


def test_a_plan_cut_to_one_look_decides_nothing_before_all_samples_were_run() -> None:
    rows = answered("copy", 160)
    outcome = up_to(rows, 4, max_rounds=1)
    assert (outcome.status, outcome.round) == ("INCONCLUSIVE", 0)
    assert outcome.reasons[0].startswith("all: 4 of 5 rounds were run, and gates.max_rounds=1 leaves one look")
    seen = [r for r in in_rounds(rows, PLAN) if r.round <= 4]
    assert not is_final(outcome, report(seen, planned_rounds=PLAN), gates(max_rounds=1))


def test_prose_alone_follows_the_same_looks_and_a_bet_waits_where_documents_are_near_the_limit() -> None:
    assert stops(prose(400)) == ("PASS", 2)  # the first look at 60 requests, of which none is ruined
    assert stops(prose(400, mean_kl=0.5)) == ("FAIL", 1)
    assert up_to(prose(24, mean_kl=0.1), 1).status == "INCONCLUSIVE"


def test_a_context_bin_fails_at_its_looks_own_level() -> None:
    rows = [row("retrieval", i, after=i % 8 != 0, context_tokens=900 if i % 4 else 100) for i in range(160)]

    def of_the_bin(outcome: Verdict) -> list[str]:
        return [
            check.reason[-14:] for check in outcome.checks if check.where == "retrieval [0, 150)" and check.status == "FAIL"
        ]

    assert [of_the_bin(up_to(rows, last)) for last in (1, 2, 3)] == [[], [], ["; round 3 of 5"]]
    assert of_the_bin(verdict(rows[:40])), "as many answers as the second look has, of an evaluation that has no looks"


@pytest.mark.parametrize("shares", [[], [0.5], [0.5, 0.5, 1.0], [0.0, 1.0], [0.7, 0.3, 1.0], [0.5, 1.5], [0.5, 0.505, 1.0]])
def test_a_plan_that_does_not_ascend_to_all_samples_is_no_report(shares: list[float]) -> None:
    with pytest.raises(ValidationError, match=r"planned_rounds must ascend to 1 in steps of 0\.01 or more"):
        report(answered("copy", 60), planned_rounds=shares)


def test_a_verdict_names_the_rules_that_made_it() -> None:
    assert verdict(answered("copy", 60)).rules == RULES
    assert Verdict.model_validate({"status": "PASS", "reasons": [], "checks": [], "samples_needed": {}}).rules == 1


def test_following_the_advice_spends_what_the_first_evaluation_left() -> None:
    attempts = [gates(attempt=number).pass_alpha for number in range(1, 21)]
    assert sum(attempts) <= GATES.alpha
    assert attempts[0] == pytest.approx(0.9 * GATES.alpha)
    text = verdict(keeping(0.953, answered("copy", 120), spread=0.1)).reasons[0]
    assert text.endswith("samples would decide with gates.attempt=2")


@pytest.mark.parametrize("attempt", [2, 20])
@pytest.mark.parametrize("last", [1, 2])
def test_later_attempts_say_at_their_first_looks_how_many_answers_decide(attempt: int, last: int) -> None:
    """The levels of these looks are below 1e-17, or 0."""
    lost = flipping("copy", 1000, lost=set(range(0, 1000, 25)))
    assert sum(up_to(lost, last, attempt=attempt).samples_needed.values()) > len(lost)


def test_the_canarys_rows_are_no_part_of_the_looks() -> None:
    rows = in_rounds(answered("copy", 160), PLAN)
    late = Canary(factor=0.1, rows=[r.model_copy(update={"round": 9}) for r in CANARY_ROWS])
    assert verdict(rows, planned_rounds=PLAN, canary=late).status == "PASS"


def test_a_planned_workload_that_was_not_asked_yet_keeps_the_verdict_open() -> None:
    rows = [r for r in in_rounds(every_class(), PLAN) if r.round <= 4]
    planned = dict.fromkeys(CLASSES, True)
    assert verdict(rows, planned_rounds=PLAN, planned_workloads=planned).status == "PASS"
    outcome = verdict(rows, planned_rounds=PLAN, planned_workloads=planned | {"legal": True})
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.reasons == ["legal: no sample of it was run yet; a later round has them"]


def test_a_margin_of_a_workload_that_comes_later_is_no_error() -> None:
    rows = [r for r in in_rounds(every_class(), PLAN) if r.round == 1]
    planned = dict.fromkeys(CLASSES, True) | {"legal": True}
    outcome = verdict(rows, gates(margins={"legal": 0.02}), planned_rounds=PLAN, planned_workloads=planned)
    assert outcome.status == "INCONCLUSIVE"
