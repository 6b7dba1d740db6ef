"""Reports, rows and engine records for the gates' tests, and limits on error rates in simulations."""

import math
from collections.abc import Sequence
from typing import Any

from stages.verdict.conformance import ComparedRequest, Conformance, Distance, EngineConformance
from stages.verdict.figures import by_workload
from stages.verdict.gates.decide import decide
from stages.verdict.report import (
    Acceptance,
    Accuracy,
    EngineTests,
    EvaluationReport,
    Fidelity,
    FreeAnswers,
    FullPool,
    SampleRow,
    Slice,
    StressResult,
    SystemMetrics,
)
from stages.verdict.verdict import Check, Thresholds, Verdict

GATES = Thresholds()
CLASSES = {"retrieval": 128, "tool_call": 128, "copy": 128, "multi_turn": 128}


def gates(**changes: object) -> Thresholds:
    return Thresholds.model_validate(changes)


def row(workload: str, index: int, before: bool = True, after: bool = True, **changes: object) -> SampleRow:
    values: dict[str, object] = {
        "id": f"{workload}-{index}",
        "workload": workload,
        "document": f"{workload}-{index}",
        "context_tokens": 100 + 10 * (index % 20),
        "scored_tokens": 100,
        "judged": True,
        "baseline_correct": before,
        "candidate_correct": after,
        "reference": "r",
        "baseline_generation": "r",
        "candidate_generation": "r",
        "mean_kl": 2**-10,  # its sums are exact
        "max_kl": 0.01,
        "far_tokens": 0,
        "baseline_nll": 0.3,
        "candidate_nll": 0.3,
        "top1_agreement": 1.0,
        "top10_overlap": 0.95,
        "non_finite_steps": 0,
        "baseline_probability": 0.25,
        "candidate_probability": 0.25,
    }
    return SampleRow.model_validate({**values, **changes})


def answered(workload: str, count: int, lost: int = 0, gained: int = 0, **changes: object) -> list[SampleRow]:
    flags = [(True, False)] * lost + [(False, True)] * gained + [(True, True)] * (count - lost - gained)
    return [row(workload, i, before, after, **changes) for i, (before, after) in enumerate(flags)]


def prose(count: int, **changes: object) -> list[SampleRow]:
    """Return rows of samples without an answer to judge."""
    answers = ("baseline_correct", "candidate_correct", "baseline_probability", "candidate_probability")
    unjudged: dict[str, Any] = {"judged": False, **dict.fromkeys(answers), **changes}
    return [row("prose", i, **unjudged) for i in range(count)]


def every_class(**lost: int) -> list[SampleRow]:
    return [r for name, count in CLASSES.items() for r in answered(name, count, lost.get(name, 0))]


def drafted(rows: list[SampleRow], candidate_passes: int) -> list[SampleRow]:
    """Return rows whose 100-token answers were drafted by lookup; the baseline needed 25 passes."""
    counts = Acceptance(baseline_tokens=100, baseline_passes=25, candidate_tokens=100, candidate_passes=candidate_passes)
    return [r.model_copy(update={"acceptance": {"lookup": counts}}) for r in rows]


CONTROL_ROWS = [r.model_copy(update={"mean_kl": 3.0}) for r in answered("retrieval", 8)]


def fidelity(**changes: object) -> Fidelity:
    values = dict.fromkeys(Fidelity.model_fields, 0.0) | {"tokens": 100, "non_finite_steps": 0}
    return Fidelity.model_validate({**values, **changes})


def measured_once(**changes: object) -> EngineTests:
    """Return the tests of a sound engine without repeated answers, with `changes`."""
    values: dict[str, object] = {
        "system": {**dict.fromkeys(SystemMetrics.model_fields, 1), "attention": "graph"},
        "free_answers": FreeAnswers(samples=0, tokens=0, contradictions=[]),
        "noise": fidelity(),
        "control": CONTROL_ROWS,
        "stress": stress_result(),
    }
    return EngineTests.model_validate({**values, **changes})


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


def report(rows: list[SampleRow], **changes: object) -> EvaluationReport:
    all_samples = Slice(workload=None, context=None, samples=len(rows), accuracy=None, fidelity=fidelity())
    low = all_samples.model_copy(update={"workload": "retrieval", "context": (0, 150)})
    values: dict[str, object] = {
        "policy": "int8",
        "engine_digest": "e",
        "baseline_digest": "b",
        "workloads_digest": "w",
        "samples": len(rows),
        "planned_rounds": 1,
        "planned_workloads": {},
        "slices": [all_samples, low],
        "conformance": conformance(SOUND_ENGINE),
        "tests": measured_once(),
        "baseline_tests": measured_once(),
        "drafters": [],
    }
    return EvaluationReport.model_validate({**values, **changes})


def _part(rows: list[SampleRow], workload: str | None) -> Slice:
    """Return the slice of one workload, or of all rows if `workload` is None, with its answers."""
    part_rows = [row for row in rows if workload in (None, row.workload)]
    counted = Accuracy.from_rows(part_rows)
    return Slice(workload=workload, context=None, samples=len(part_rows), accuracy=counted, fidelity=fidelity())


def sliced(rows: list[SampleRow]) -> EvaluationReport:
    """Return a report with one slice of all rows and one slice per workload."""
    return report(rows, slices=[_part(rows, name) for name in (None, *dict.fromkeys(row.workload for row in rows))])


def verdict(rows: list[SampleRow], thresholds: Thresholds = GATES, **changes: object) -> Verdict:
    return decide(report(rows, **changes), rows, thresholds)


def lines(key: str, judged: EvaluationReport, rows: Sequence[SampleRow] = (), thresholds: Thresholds = GATES) -> list[Check]:
    """Return the lines of gate `key` in the verdict on the report `judged` over `rows`, by default 60 sound rows."""
    rows = rows or answered("copy", 60)
    outcome = decide(judged.model_copy(update={"samples": len(rows)}), rows, thresholds)
    return [check for check in outcome.checks if check.gate == key]


def full_pool_line(full_pool: FullPool) -> Check:
    """Return the report line for a given full-pool measurement."""
    (line,) = lines("full_pool", report([], tests=measured_once(full_pool=full_pool)))
    return line


def in_rounds(rows: list[SampleRow], shares: list[float]) -> list[SampleRow]:
    """Return the rows with round numbers, so that each workload is split by the given cumulative shares."""
    numbered = []
    for workload_rows in by_workload(rows).values():
        ends = [math.ceil(round(share * len(workload_rows), 9)) for share in shares]
        numbered += [r.model_copy(update={"round": 1 + sum(i >= end for end in ends)}) for i, r in enumerate(workload_rows)]
    return numbered


def at_most(rate: float, runs: int) -> float:
    """Return the limit that the share among `runs` exceeds with a probability of 1/1,000 if the true rate is `rate`."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / runs)
