"""Rounds: the effect of several looks on a verdict, and verdicts that more samples cannot decide."""

from typing import Any

import pytest
from helpers.policies.shipped import SHIPPED
from helpers.verdicts.reports import (
    CLASSES,
    CONTROL_ROWS,
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

from stages.policies.policy import KVPolicy, KVShape
from stages.verdict.gates import decide, is_final
from stages.verdict.report import MustFailControl, SampleRow
from stages.verdict.thresholds import ALPHA, MAX_ATTEMPTS, RULES, Verdict

PLAN = [0.1, 0.25, 0.5, 0.75, 1.0]


def up_to(rows: list[SampleRow], last: int, **changes: object) -> Verdict:
    """Return the verdict on the rounds up to `last` of an evaluation in rounds."""
    rows = [r for r in in_rounds(rows, PLAN) if r.round <= last]
    return verdict(rows, gates(**changes), planned_rounds=len(PLAN))


def stops(rows: list[SampleRow]) -> tuple[str, int]:
    """Return the verdict of an evaluation that stops once it is decided, and the number of rounds."""
    numbered = in_rounds(rows, PLAN)
    for last in range(1, len(PLAN) + 1):
        seen = [r for r in numbered if r.round <= last]
        judged = report(seen, planned_rounds=len(PLAN))
        outcome = decide(judged, seen, GATES)
        if is_final(outcome, judged):
            return outcome.status, last
    raise AssertionError("the last look is final")


def keeping(share: float, rows: list[SampleRow], spread: float = 0.0) -> list[SampleRow]:
    """Return rows whose candidate keeps `share` of the probability of right answers, alternately `spread` more and less."""
    shares = [share + (-spread if i % 2 else spread) for i in range(len(rows))]
    return [
        r.model_copy(update={"candidate_probability": kept * (r.baseline_probability or 0.0)})
        for kept, r in zip(shares, rows, strict=True)
    ]


def test_a_broken_engine_fails_after_one_round_for_good() -> None:
    rows = [row("copy", i, after=i >= 16) for i in range(160)] + answered("retrieval", 160)
    assert stops(rows) == ("FAIL", 1)
    (reason,) = up_to(rows, 1).reasons
    assert reason.startswith("copy: 16 of 16 answers lost, 0 gained")
    assert reason.endswith("; round 1 of 5")
    assert up_to(rows, 5).reasons[0].endswith("; round 3 of 5"), "later answers are right"


def test_a_sound_engine_passes_as_soon_as_60_samples_were_run() -> None:
    rows = answered("copy", 160) + answered("retrieval", 160)
    assert stops(rows) == ("PASS", 2)
    second = up_to(rows, 2)
    assert (second.round, second.rules) == (2, RULES)


def test_what_passed_at_an_early_look_does_not_pass_for_good() -> None:
    rows = [r if i < 80 else keeping(0.93, [r])[0] for i, r in enumerate(answered("copy", 800))]
    assert up_to(rows, 1).status == "PASS"
    assert up_to(rows, 5).status != "PASS"
    early, late = prose(300, round=1, mean_kl=0.001), prose(340, round=2, mean_kl=1.0)[300:]  # only late ones are ruined
    assert verdict(early, planned_rounds=2).status == "PASS"
    later = verdict(early + late, planned_rounds=2)
    assert {check.gate for check in later.checks if check.status == "FAIL"} == {"max_mean_kl", "max_ruined_share"}
    control = MustFailControl(factor=0.1, rows=[r.model_copy(update={"round": 9}) for r in CONTROL_ROWS])
    assert verdict(in_rounds(answered("copy", 160), PLAN), planned_rounds=5, control=control).status == "PASS", "is no look"


def test_an_undecided_plan_ends_inconclusive_and_final() -> None:
    rows = keeping(0.953, answered("copy", 120), spread=0.1)
    assert stops(rows) == ("INCONCLUSIVE", 5)
    assert up_to(rows, 5).samples_needed["copy"] > 120


def test_students_t_decides_many_documents_if_a_bet_does_not() -> None:
    """Half of the documents lose more than the bet allows for."""
    for documents, spread, status in ((36, 0.105, "PASS"), (35, 0.105, "INCONCLUSIVE"), (36, 0.15, "INCONCLUSIVE")):
        (check,) = lines("min_recovery", report(rows := keeping(1.0, answered("copy", documents), spread)), rows)[:1]
        assert check.status == status
        assert (check.bound or 0.0) < 1


def test_what_samples_do_not_decide_stops_after_the_first_round() -> None:
    seen = [r for r in in_rounds([*answered("copy", 160), *answered("retrieval", 600)], PLAN) if r.round == 1]
    cases: list[tuple[dict[str, Any], str]] = [({"samples": 33}, "FAIL"), ({"noise": None}, "INCONCLUSIVE")]
    for changes, status in cases:
        judged = report(seen, planned_rounds=len(PLAN), **changes)
        outcome = decide(judged, seen, GATES)
        assert (outcome.status, is_final(outcome, judged)) == (status, True)


def test_prose_alone_follows_the_looks_and_waits_near_the_limit() -> None:
    assert stops(prose(400)) == ("PASS", 2)  # the first look at 60 requests without a ruined request
    assert stops(prose(400, mean_kl=0.5)) == ("FAIL", 1)
    assert up_to(prose(24, mean_kl=0.1), 1).status == "INCONCLUSIVE"


def test_student_s_t_is_used_at_the_last_planned_look_alone() -> None:
    rows = keeping(1.0, answered("copy", 48), spread=0.105)
    seen = [{c.status for c in up_to(rows, last).checks if (c.gate, c.where) == ("min_recovery", "all")} for last in (3, 4, 5)]
    assert seen == [{"INCONCLUSIVE"}, {"INCONCLUSIVE"}, {"PASS"}]


def test_following_the_advice_spends_the_remaining_level() -> None:
    attempts = [gates(attempt=number).pass_alpha for number in range(1, MAX_ATTEMPTS + 1)]
    assert sum(attempts) <= ALPHA
    assert attempts[0] == pytest.approx(0.9 * ALPHA)
    rows = keeping(0.953, answered("copy", 120), spread=0.1)
    assert verdict(rows).reasons[0].endswith("samples would decide with gates.attempt=2")
    last = verdict(rows, gates(attempt=MAX_ATTEMPTS))
    assert last.reasons[0].endswith(f"; gates.attempt={MAX_ATTEMPTS} was the last attempt")
    assert last.samples_needed == {}


def test_a_planned_workload_that_did_not_run_is_inconclusive() -> None:
    rows = [r for r in in_rounds(every_class(), PLAN) if r.round <= 4]
    planned = dict.fromkeys(CLASSES, True)
    assert verdict(rows, planned_rounds=len(PLAN), planned_workloads=planned).status == "PASS"
    outcome = verdict(rows, planned_rounds=len(PLAN), planned_workloads=planned | {"legal": True})
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.reasons == ["legal: none of its samples ran yet; they are in a later round"]


SHAPE = KVShape(layers=2, kv_heads=1, head_dim=64)


def test_a_policy_is_open_until_a_sample_is_long_enough() -> None:
    sound, short = ([r.model_copy(update={"context_tokens": n, "scored_tokens": 1}) for r in every_class()] for n in (900, 899))
    effects = {"kv.sink_tokens": 65, "kv.window.tokens": 900}
    assert verdict(sound, takes_effect=effects).status == "PASS"
    outcome = verdict(short, takes_effect=effects)
    said = "no token left the window: the longest sample has 899 tokens, kv.window.tokens takes effect from 900 tokens on"
    assert outcome.reasons == [f"all: {said}; ask longer samples, or lower kv.window.tokens"]
    assert is_final(outcome, report(short)), "more samples of the same length decide nothing"


@pytest.mark.parametrize("policy", SHIPPED.values(), ids=SHIPPED)
def test_the_lengths_are_those_at_which_the_cache_changes(policy: KVPolicy) -> None:
    effects = policy.takes_effect
    evicting, aging = effects.get("kv.eviction.window_tokens"), effects.get("kv.window.tokens")
    assert (evicting is None, aging is None) == (policy.eviction is None, policy.window is None)
    if evicting is not None:
        assert [policy.kept_tokens(n, SHAPE) < n for n in (evicting - 1, evicting)] == [False, True]
    if aging is not None and policy.window is not None:
        assert [policy.window.first_page(n) for n in (aging - 1, aging)] == [0, 1]


def test_heavy_hitters_lose_single_tokens() -> None:
    plain = SHIPPED["fp16"].model_dump()
    policy = KVPolicy.model_validate(plain | {"eviction": {"window_tokens": 64, "heavy_tokens": 128}})
    assert policy.takes_effect == {"kv.eviction.window_tokens": 193}
