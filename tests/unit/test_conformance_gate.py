"""The gate on an engine and its twin: what fails, what is only said, and what old reports lack."""

import math
from typing import Any

import pytest
from gate_reports import every_class, report, verdict

from pipeline.verdict.conformance import (
    ALLOWED,
    ComparedRequest,
    Conformance,
    Deviation,
    Distance,
    EngineConformance,
    allowed,
    conformance,
)
from pipeline.verdict.report import EvaluationReport
from pipeline.verdict.tracked import flat_metrics


def request(kl: float | None = 1e-12, stored: float | None = 0.0, mean: float | None = 0.0, **changes: Any) -> ComparedRequest:
    engine = Distance(kl_mean=kl, kl_max=kl, logit_difference=0.0, stored_error=stored, stored_mean=mean)
    rounding = Distance(kl_mean=1e-12, kl_max=1e-12, logit_difference=0.0, stored_error=1e-4, stored_mean=1e-6)
    values: dict[str, Any] = {"sample": "a", "prompt_tokens": 9, "decoded_tokens": 5, "engine": engine, "rounding": rounding}
    return ComparedRequest.model_validate({**values, **changes})


def engine(*requests: ComparedRequest, **changes: Any) -> EngineConformance:
    return EngineConformance(policy="int8", requests=list(requests), **changes)


def record(
    candidate: EngineConformance, baseline: EngineConformance | None = None, dtype: str | None = "float32"
) -> Conformance:
    return Conformance(compute_dtype=dtype, baseline=engine(request()) if baseline is None else baseline, candidate=candidate)


SOUND = engine(*[request() for _ in range(6)])


def test_a_sound_engine_passes_and_the_bound_on_rare_faults_is_said() -> None:
    check = conformance(record(SOUND))[1]
    assert check.status == "PASS"
    assert check.reason.endswith("so that at most 39 % of requests deviate (95 %)"), "1 - 0.05^(1/6)"
    assert verdict(every_class(), conformance=record(SOUND)).status == "PASS"


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
    assert [check.status for check in conformance(record(faulty))] == ["PASS", "FAIL"]
    assert conformance(record(SOUND, baseline=faulty))[0].status == "FAIL"
    judged = verdict(every_class(), conformance=record(faulty))
    assert judged.status == "FAIL"
    assert "1 of 7 requests" in judged.reasons[0]


def test_the_reason_names_the_place_and_both_distances() -> None:
    where = Deviation(
        sample="x", position=81, page_offset=17, batch_row=3, batch_size=16, act="stored", layer=2, side="key", head=1
    )
    faulty = engine(request(kl=1e-2), deviation=where, kl=1.2e-2, twin_kl=8e-3)
    reason = conformance(record(faulty))[1].reason
    assert reason.startswith(
        "candidate: does not compute int8 (KL 1.2e-02 against the twin; twin against FP16 8.0e-03), first stored wrong at "
        "position 81 (page offset 17, row 3 of a batch of 16) of sample x, layer 2 head 1 keys; 1 of 1 requests"
    )


def test_a_candidate_may_be_as_far_as_its_baseline_makes_usual_and_no_farther() -> None:
    coarse = request(kl=1e-12 * 9.5**2)
    limit = allowed([coarse])
    assert ALLOWED < limit < 10 * ALLOWED
    assert allowed([]) == ALLOWED
    assert allowed([request(kl=None)]) == ALLOWED**2
    between = engine(request(kl=1.1e-12 * (1.5 * ALLOWED) ** 2))
    assert conformance(record(between))[1].status == "FAIL"
    assert conformance(record(between, baseline=engine(coarse)))[1].status == "PASS"


def test_an_arithmetic_of_its_own_is_described_and_not_judged() -> None:
    check = conformance(record(engine(request(kl=1e-2)), dtype=None))[1]
    assert (check.status, check.threshold) == ("PASS", None)
    assert "int8 in an arithmetic of its own: KL 1.0e-02 from the oracle's" in check.reason


def test_nothing_compared_is_inconclusive_and_an_older_report_has_no_line() -> None:
    assert conformance(record(engine()))[1].status == "INCONCLUSIVE"
    assert "workloads.conformance_samples" in conformance(record(engine()))[1].reason
    assert conformance(None) == []


def test_the_record_survives_a_report_and_is_tracked() -> None:
    whole = report(every_class(), conformance=record(SOUND))
    again = EvaluationReport.model_validate_json(whole.model_dump_json())
    assert again == whole
    metrics = flat_metrics(whole)
    assert metrics["conformance/candidate_requests"] == 6
    assert math.isclose(metrics["conformance/candidate_kl_max"], 1e-12)
