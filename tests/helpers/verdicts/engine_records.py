"""Records of the stress test and of conformance for the gates' tests, of sound and of faulty engines."""

from typing import Any

from helpers.verdicts.reports import measured_once
from stages.verdict.conformance import ComparedRequest, Conformance, Distance, EngineConformance
from stages.verdict.report import EngineTests, FreeAnswers, StressResult


def stress_result(**changes: object) -> StressResult:
    """Return the result of a sound stress test, with `changes`."""
    values: dict[str, object] = {
        "tokens": 2048, "decoded": 320, "batch": 32, "page_offsets": 64, "forks": 9, "requests": 400, "rows": 9, "failures": [],
        "together": 68, "turns": 0,
    }  # fmt: skip
    return StressResult.model_validate({**values, **changes})


def engine_tests(stress: StressResult | None = None, free: list[str] | None = None) -> EngineTests:
    answers = FreeAnswers(samples=2, tokens=9, contradictions=free or [])
    return measured_once(free_answers=answers, stress=stress or stress_result())


FAILED_STRESS = stress_result(failures=["fork: fork at 65 tokens: KL 1"])
LARGER_POOL = stress_result(allocation="8 bytes a token are allocated, the policy claims 2")


def compared(kl: float | None = 1e-12, stored: float | None = 0.0, mean: float | None = 0.0, **changes: Any) -> ComparedRequest:
    """Return a compared request with the given distances; by default it differs by rounding only."""
    engine = Distance(kl_mean=kl, kl_max=kl, stored_error=stored, stored_mean=mean)
    rounding = Distance(kl_mean=1e-12, kl_max=1e-12, stored_error=1e-4, stored_mean=1e-6)
    values: dict[str, Any] = {"sample": "a", "prompt_tokens": 9, "decoded_tokens": 5, "engine": engine, "rounding": rounding}
    return ComparedRequest.model_validate({**values, **changes})


def engine_conformance(*requests: ComparedRequest, **changes: Any) -> EngineConformance:
    return EngineConformance(policy="int8", requests=list(requests), **changes)


def conformance(
    candidate: EngineConformance, baseline: EngineConformance | None = None, rounding: float | None = 2.0**-22
) -> Conformance:
    baseline = engine_conformance(compared()) if baseline is None else baseline
    return Conformance(rounding=rounding, baseline=baseline, candidate=candidate)


SOUND_ENGINE = engine_conformance(*[compared() for _ in range(6)])
