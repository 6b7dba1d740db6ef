"""Sequential evaluation: verdicts after each round, and verdicts that more samples cannot decide."""

from typing import Any

import pytest
from helpers.policies.shipped import SHIPPED
from helpers.verdicts.reports import (
    CLASSES,
    CONTROL_ROWS,
    GATES,
    answered,
    drafted,
    every_class,
    gates,
    in_rounds,
    lines,
    measured_once,
    prose,
    report,
    row,
    verdict,
)

from stages.policies.policy import KVPolicy, KVShape
from stages.verdict.bets import Result
from stages.verdict.figures import Figure
from stages.verdict.gates.decide import decide, is_final
from stages.verdict.report import SampleRow
from stages.verdict.verdict import ALPHA, MAX_ATTEMPTS, RULES, Verdict

PLAN = [0.1, 0.25, 0.5, 0.75, 1.0]


def verdict_after(rows: list[SampleRow], last: int, **changes: object) -> Verdict:
    """Return the verdict on the rounds up to `last` of PLAN."""
    rows = [r for r in in_rounds(rows, PLAN) if r.round <= last]
    return verdict(rows, gates(**changes), planned_rounds=len(PLAN))


def final_verdict(rows: list[SampleRow]) -> tuple[str, int]:
    """Return the status of the first final verdict over the rounds of PLAN, and the number of its round."""
    numbered = in_rounds(rows, PLAN)
    for last in range(1, len(PLAN) + 1):
        finished = [r for r in numbered if r.round <= last]
        judged = report(finished, planned_rounds=len(PLAN))
        outcome = decide(judged, finished, GATES)
        if is_final(outcome, judged):
            return outcome.status, last
    raise AssertionError("the last look is final")


def with_recovery(share: float, rows: list[SampleRow], spread: float = 0.0) -> list[SampleRow]:
    """Return rows with a recovery of `share`, alternately `spread` more and less."""
    shares = [share + (-spread if i % 2 else spread) for i in range(len(rows))]
    return [
        r.model_copy(update={"candidate_probability": recovery * (r.baseline_probability or 0.0)})
        for recovery, r in zip(shares, rows, strict=True)
    ]


def test_a_fail_at_an_early_look_is_final() -> None:
    rows = [row("copy", i, after=i >= 16) for i in range(160)] + answered("retrieval", 160)
    assert final_verdict(rows) == ("FAIL", 1)
    (reason,) = verdict_after(rows, 1).reasons
    assert reason.startswith("copy: 16 of 16 answers lost, 0 gained")
    assert reason.endswith("; round 1 of 5")
    assert verdict_after(rows, 5).reasons[0].endswith("; round 3 of 5"), "later answers are right"


def test_a_sound_engine_passes_after_60_samples() -> None:
    rows = answered("copy", 160) + answered("retrieval", 160)
    assert final_verdict(rows) == ("PASS", 2)
    second = verdict_after(rows, 2)
    assert (second.round, second.rules) == (2, RULES)


def test_a_pass_at_an_early_look_is_not_final() -> None:
    rows = [r if i < 80 else with_recovery(0.93, [r])[0] for i, r in enumerate(answered("copy", 800))]
    assert verdict_after(rows, 1).status == "PASS"
    assert verdict_after(rows, 5).status != "PASS"
    early, late = prose(300, round=1, mean_kl=0.001), prose(340, round=2, mean_kl=1.0)[300:]  # only late requests are ruined
    assert verdict(early, planned_rounds=2).status == "PASS"
    later = verdict(early + late, planned_rounds=2)
    assert {check.gate for check in later.checks if check.status == "FAIL"} == {"max_mean_kl", "max_ruined_share"}
    tests = measured_once(control=[r.model_copy(update={"round": 9}) for r in CONTROL_ROWS])
    assert verdict(in_rounds(answered("copy", 160), PLAN), planned_rounds=5, tests=tests).status == "PASS", "not a look"


def test_an_undecided_evaluation_is_inconclusive_after_the_last_round() -> None:
    rows = with_recovery(0.953, answered("copy", 120), spread=0.1)
    assert final_verdict(rows) == ("INCONCLUSIVE", 5)
    assert verdict_after(rows, 5).samples_needed > 120


def test_students_t_decides_from_36_documents_on() -> None:
    """Half of the documents lose more than the bet assumes, so the bet decides nothing."""
    for documents, spread, status in ((36, 0.105, "PASS"), (35, 0.105, "INCONCLUSIVE"), (36, 0.15, "INCONCLUSIVE")):
        (check,) = lines("min_recovery", report(rows := with_recovery(1.0, answered("copy", documents), spread)), rows)[:1]
        assert check.status == status
        assert check.bound is not None
        assert check.bound < 1


def test_checks_that_samples_cannot_decide_stop_after_the_first_round() -> None:
    first_round = [r for r in in_rounds([*answered("copy", 160), *answered("retrieval", 600)], PLAN) if r.round == 1]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"samples": 33}, "FAIL"),
        ({"baseline_tests": measured_once(noise=None)}, "INCONCLUSIVE"),
    ]
    for changes, status in cases:
        judged = report(first_round, planned_rounds=len(PLAN), **changes)
        outcome = decide(judged, first_round, GATES)
        assert (outcome.status, is_final(outcome, judged)) == (status, True)


def test_prose_alone_is_judged_by_distances() -> None:
    assert final_verdict(prose(400)) == ("PASS", 2)  # the first decision with 60 requests
    assert final_verdict(prose(400, mean_kl=0.5)) == ("FAIL", 1)
    assert verdict_after(prose(24, mean_kl=0.1), 1).status == "INCONCLUSIVE"


def test_students_t_is_used_only_at_the_last_planned_look() -> None:
    rows = with_recovery(1.0, answered("copy", 48), spread=0.105)
    for last, status in ((3, "INCONCLUSIVE"), (4, "INCONCLUSIVE"), (5, "PASS")):
        checks = verdict_after(rows, last).checks
        assert [check.status for check in checks if (check.gate, check.where) == ("min_recovery", "all")] == [status]


def test_all_attempts_together_stay_within_alpha() -> None:
    attempts = [gates(attempt=number).pass_alpha for number in range(1, MAX_ATTEMPTS + 1)]
    assert sum(attempts) <= ALPHA
    assert attempts[0] == pytest.approx(0.9 * ALPHA)
    rows = with_recovery(0.953, answered("copy", 120), spread=0.1)
    assert verdict(rows, gates(attempt=MAX_ATTEMPTS)).samples_needed == 0, "there is no next attempt"


LATE: dict[str, tuple[list[SampleRow], dict[str, Any]]] = {
    "a workload without answers": (
        [*answered("copy", 60), *prose(5, round=2)],
        {"planned_workloads": {"copy": True, "prose": False}},
    ),
    "a workload with drafts": (
        drafted([*answered("copy", 60), *answered("tool_call", 20, round=2)], 25),
        {"planned_workloads": {"copy": True, "tool_call": True}, "drafters": ["lookup"]},
    ),
    "a context bin": (
        [*answered("retrieval", 60, context_tokens=200), row("retrieval", 60, context_tokens=100, round=2)],
        {"planned_workloads": {"retrieval": True}, "planned_bins": 2},
    ),
}
"""Figures that appear in the second round -> samples, and the plan in the report."""


@pytest.mark.parametrize("name", LATE)
def test_all_figures_of_all_looks_fail_wrongly_within_alpha(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure may fail at any look, so the largest of its levels counts."""
    levels: dict[bool, dict[tuple[str, str], float]] = {True: {}, False: {}}
    test = Figure.test

    def recorded(figure: Figure, fail_level: float, pass_level: float, *, last: bool) -> Result:
        place = figure.gate, figure.where
        group = levels[figure.gate == "min_recovery"]
        group[place] = max(group.get(place, 0.0), fail_level)
        return test(figure, fail_level, pass_level, last=last)

    monkeypatch.setattr(Figure, "test", recorded)
    rows, plan = LATE[name]
    assert verdict(rows, planned_rounds=2, **plan).round == 2
    for group in levels.values():
        assert sum(group.values()) <= ALPHA / 2 * (1 + 1e-9)


def test_a_planned_workload_that_did_not_run_is_inconclusive() -> None:
    rows = [r for r in in_rounds(every_class(), PLAN) if r.round <= 4]
    planned = dict.fromkeys(CLASSES, True)
    assert verdict(rows, planned_rounds=len(PLAN), planned_workloads=planned).status == "PASS"
    outcome = verdict(rows, planned_rounds=len(PLAN), planned_workloads=planned | {"legal": True})
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.reasons == ["legal: none of its samples ran yet; they are in a later round"]


SHAPE = KVShape(layers=2, kv_heads=1, head_dim=64)


def test_samples_too_short_for_the_policy_are_inconclusive() -> None:
    long, short = ([r.model_copy(update={"context_tokens": n, "scored_tokens": 1}) for r in every_class()] for n in (900, 899))
    effects = {"kv.sink_tokens": 65, "kv.window.tokens": 900}
    assert verdict(long, takes_effect=effects).status == "PASS"
    outcome = verdict(short, takes_effect=effects)
    reason = "no token left the window: the longest sample has 899 tokens, kv.window.tokens takes effect from 900 tokens on"
    assert outcome.reasons == [f"all: {reason}; ask longer samples, or lower kv.window.tokens"]
    assert is_final(outcome, report(short)), "more samples of the same length decide nothing"


@pytest.mark.parametrize("policy", SHIPPED.values(), ids=SHIPPED)
def test_takes_effect_is_the_first_length_that_changes_the_cache(policy: KVPolicy) -> None:
    effects = policy.takes_effect
    evicting, aging = effects.get("kv.eviction.window_tokens"), effects.get("kv.window.tokens")
    assert (evicting is None, aging is None) == (policy.eviction is None, policy.window is None)
    if evicting is not None:
        assert [policy.kept_tokens(n, SHAPE) < n for n in (evicting - 1, evicting)] == [False, True]
    if aging is not None and policy.window is not None:
        assert [policy.window.first_page(n) for n in (aging - 1, aging)] == [0, 1]


def test_heavy_hitters_evict_single_tokens() -> None:
    plain = SHIPPED["fp16"].model_dump()
    for sinks in (0, 4):
        eviction = {"window_tokens": 64, "heavy_tokens": 128, "sink_tokens": sinks}
        policy = KVPolicy.model_validate(plain | {"eviction": eviction})
        assert policy.takes_effect == {"kv.eviction.window_tokens": 193 + sinks}
