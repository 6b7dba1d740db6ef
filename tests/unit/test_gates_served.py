"""A server by URL: what it does not show keeps it from passing, and what it shows can fail it."""

import pytest
from gate_reports import GATES, answered, every_class, report, verdict

from pipeline.verdict.delivery import Served, ServerSeen
from pipeline.verdict.gates import decide, is_final
from pipeline.verdict.report import Canary


def seen(**changes: object) -> ServerSeen:
    values: dict[str, object] = {
        "url": "http://host:8000",
        "model": "m",
        "release": "",
        "says": {},
        "tokens": 100,
        "shown_mass": 0.98,
        "prompt_tokens": 1000,
        "cached_tokens": 900,
    }
    return ServerSeen.model_validate({**values, **changes})


def served(canary_url: str | None = "http://host:8002", **changes: object) -> Served:
    return Served(candidate=seen(**changes), baseline=seen(), top_logprobs=20, canary_url=canary_url)


def test_a_lower_bound_within_a_limit_warns_and_exact_figures_pass() -> None:
    checks = {check.gate: check.status for check in verdict(every_class(), served=served()).checks}
    assert {checks[gate] for gate in ("max_mean_kl", "max_ruined_share", "max_p999_kl")} == {"WARNING"}
    assert {checks[gate] for gate in ("min_top10_overlap", "max_ppl_ratio", "accuracy")} == {"PASS"}


def test_a_lower_bound_above_a_limit_fails() -> None:
    rows = [row.model_copy(update={"mean_kl": 1.0, "max_kl": 2.0}) for row in every_class()]
    assert {check.status for check in verdict(rows, served=served()).checks if check.gate == "max_mean_kl"} == {"FAIL"}


def test_without_a_corrupted_server_the_canary_is_open_and_with_a_blind_one_it_fails() -> None:
    canaries = []
    for given in (served(canary_url=None), served()):
        decided = verdict(every_class(), served=given, canary=Canary(factor=None, rows=[]))
        canaries += [(check.status, check.reason) for check in decided.checks if check.gate == "canary"]
    (status, reason), (blind, _) = canaries
    assert (status, blind) == ("INCONCLUSIVE", "FAIL")
    assert "backend.canary_url=null" in reason


@pytest.mark.parametrize(("kept", "final"), [(1.0, True), (0.953, False)])
def test_no_round_is_run_for_what_no_round_would_show(kept: float, final: bool) -> None:
    shares = [kept + (0.1 if i % 2 else -0.1) * (kept < 1) for i in range(120)]
    found = zip(shares, answered("copy", 120), strict=True)
    rows = [r.model_copy(update={"candidate_probability": 0.25 * share}) for share, r in found]
    judged = report(rows, served=served(canary_url=None), canary=Canary(factor=None, rows=[]), planned_rounds=[0.95, 1.0])
    assert is_final(decide(judged, rows, GATES), judged, GATES) is final


def test_rounds_are_joined_by_their_tokens() -> None:
    joined = ServerSeen.merged([seen(), seen(tokens=300, shown_mass=0.9)])
    assert joined.tokens == 400
    assert joined.shown_mass == pytest.approx(0.92)
    assert (joined.prompt_tokens, joined.cached_tokens) == (2000, 1800)
    assert ServerSeen.merged([seen(), seen(cached_tokens=None)]).cached_tokens is None
