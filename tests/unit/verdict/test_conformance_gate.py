"""The conformance gate: an engine's results are compared with the reference engine's, request by request."""

from typing import Any

import pytest
from gate_reports import every_class, lines, report, verdict

from stages.verdict.conformance import ALLOWED, ComparedRequest, Conformance, Deviation, Distance, EngineConformance, allowed


def request(kl: float | None = 1e-12, stored: float | None = 0.0, mean: float | None = 0.0, **changes: Any) -> ComparedRequest:
    engine = Distance(kl_mean=kl, kl_max=kl, stored_error=stored, stored_mean=mean)
    rounding = Distance(kl_mean=1e-12, kl_max=1e-12, stored_error=1e-4, stored_mean=1e-6)
    values: dict[str, Any] = {"sample": "a", "prompt_tokens": 9, "decoded_tokens": 5, "engine": engine, "rounding": rounding}
    return ComparedRequest.model_validate({**values, **changes})


def engine(*requests: ComparedRequest, **changes: Any) -> EngineConformance:
    return EngineConformance(policy="int8", requests=list(requests), **changes)


def record(
    candidate: EngineConformance, baseline: EngineConformance | None = None, dtype: str | None = "float32"
) -> Conformance:
    return Conformance(compute_dtype=dtype, baseline=engine(request()) if baseline is None else baseline, candidate=candidate)


SOUND = engine(*[request() for _ in range(6)])


def judged(*of: object, **how: Any) -> list[tuple[str, str]]:
    """Return the status and reason for the baseline and for the candidate."""
    made = record(*of, **how)  # type: ignore[arg-type]
    return [(check.status, check.reason) for check in lines("conformance", report([], conformance=made))]


DEVIATION = Deviation(
    sample="x", position=81, page_offset=17, batch_row=3, batch_size=16, operation="stored", layer=2, side="key", head=1
)
COARSE = request(kl=1e-12 * 9.5**2)
BETWEEN = engine(request(kl=1.1e-12 * (1.5 * ALLOWED) ** 2))


@pytest.mark.parametrize(
    ("candidate", "how", "status", "said"),
    [
        (SOUND, {}, "PASS", "so that at most 39 % of requests deviate (95 %)"),  # 1 - 0.05^(1/6)
        (BETWEEN, {}, "FAIL", "1 of 1 requests"),
        (
            engine(*BETWEEN.requests, limit=allowed([COARSE])),
            {"baseline": engine(COARSE)},
            "PASS",
            "as the reference engine does",
        ),
        (
            engine(request(kl=1e-2)),
            {"dtype": None},
            "PASS",
            "int8 has arithmetic of its own, so this is only shown: KL 1.0e-02 from the reference engine",
        ),
        (engine(request(kl=None)), {"dtype": None}, "PASS", "KL inf from the reference engine, at most inf"),
        (engine(), {}, "INCONCLUSIVE", "workloads.conformance_samples"),
        (
            engine(request(kl=1e-2), deviation=DEVIATION),
            {},
            "FAIL",
            "candidate: does not compute int8, first stored wrong at position 81 (page offset 17, row 3 of a "
            "batch of 16) of sample x, layer 2 head 1 keys; 1 of 1 requests",
        ),
    ],
    ids=["sound", "too far", "as far as its baseline is", "another arithmetic", "no number", "nothing compared", "the place"],
)
def test_a_candidate_is_judged_by_roundings(candidate: EngineConformance, how: dict[str, Any], status: str, said: str) -> None:
    (_, (found, reason)) = judged(candidate, **how)
    assert found == status
    assert said in reason


@pytest.mark.parametrize(
    "fault",
    [
        request(kl=1e-7),
        request(kl=None),
        request(stored=3e-3),
        request(mean=1e-3),
        request(stored=None),
        request(problem="layer 0 keys take 128 bytes a token and head, int4 takes 32"),
    ],
)
def test_one_request_of_many_fails_either_engine(fault: ComparedRequest) -> None:
    faulty = engine(*SOUND.requests, fault)
    assert [status for status, _ in judged(faulty)] == ["PASS", "FAIL"]
    assert judged(SOUND, baseline=faulty)[0][0] == "FAIL"
    outcome = verdict(every_class(), conformance=record(faulty))
    assert outcome.status == "FAIL"
    assert "1 of 7 requests" in outcome.reasons[0]


def test_a_candidate_is_allowed_what_its_baseline_makes_usual_up_to_a_limit() -> None:
    assert ALLOWED < allowed([COARSE]) < 10 * ALLOWED
    assert allowed([]) == ALLOWED
    assert allowed([request(kl=None)]) == ALLOWED**2
