"""The coverage of an evaluation, the free answers, the allocated memory, the conformance gate, and the delivered scales."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from helpers.engines.fake import EOS, CharTokenizer, fake_engine, sharing_engine
from helpers.verdicts.reports import (
    SOUND_ENGINE,
    compared,
    conformance,
    engine_conformance,
    engine_tests,
    every_class,
    gates,
    lines,
    report,
    stress_result,
    verdict,
)

from stages.core.records import Sample
from stages.engines.backend import ROUNDING
from stages.evaluate.conformance.comparer import MIN_MEASURED, ReferenceEngine
from stages.evaluate.decoding.decode import StoppingCriteria, decode
from stages.evaluate.decoding.free import free_answers
from stages.evaluate.decoding.stored import SampleResult
from stages.evaluate.decoding.system import wrong_allocation
from stages.evaluate.inputs.tokens import encode
from stages.policies.policy import Side
from stages.policies.scales import LayerDelivery, ScaleChangeKind, describe_changes, scale_changes
from stages.verdict.conformance import ALLOWED, Deviation, Distance, EngineConformance, allowed, allowed_in_layer
from stages.verdict.coverage import Exercised, Limits

SAMPLES = [
    Sample(id="short", workload="a", prompt="abc", reference="xy"),
    Sample(id="long", workload="b", prompt="p" * 62, reference="answer"),
    Sample(id="wrong", workload="b", prompt="q" * 10, reference="abcdef"),
]


def exercised() -> Exercised:
    """Return the coverage of SAMPLES. The wrong answer is not the reference, and continues up to its limit: 11 tokens."""
    items = encode(SAMPLES, CharTokenizer(), 9)
    events = decode(sharing_engine(SAMPLES, wrong=["wrong"]), items, 2, StoppingCriteria((EOS,), 4))
    return Exercised.merged([event.trace for event in events if isinstance(event, SampleResult)])


def test_free_answers_that_contradict_forced_decode_are_reported() -> None:
    engine = fake_engine(SAMPLES)
    items = encode(SAMPLES, CharTokenizer(), 9)
    sound = free_answers(engine, items, 2, StoppingCriteria((EOS,), 4))
    assert (sound.samples, sound.contradictions) == (3, [])
    assert engine.live == 0
    generate = engine.generate
    engine.generate = lambda *args, **options: [[*answer[:1], 7, *answer[2:]] for answer in generate(*args, **options)]  # type: ignore[method-assign]
    contradictions = free_answers(engine, items, 2, StoppingCriteria((EOS,), 4)).contradictions
    assert len(contradictions) == 3
    assert contradictions[0].startswith("sample short: token 1 of generate is 7, which forced decode finds")


def test_free_answers_that_equal_the_decoded_answers_are_not_forced() -> None:
    engine = fake_engine(SAMPLES)
    items = encode(SAMPLES, CharTokenizer(), 9)
    answers = engine.generate([item.prompt for item in items], 9, (EOS,))
    changed = [*answers[0][:1], 7, *answers[0][2:]]
    with (
        patch.object(engine, "generate", lambda *_, **__: answers),
        patch.object(engine, "decode", Mock(wraps=engine.decode)) as decode,
    ):
        assert not free_answers(engine, items, 2, StoppingCriteria((EOS,), 4), decoded=answers).contradictions
        assert not decode.called
        free_answers(engine, items, 2, StoppingCriteria((EOS,), 4), decoded=[changed, None, answers[2]])
    first_step = decode.call_args_list[0].args[1]
    assert first_step == [answers[0][0], answers[1][0]], "only the first differs, and the second was not decoded"


def test_allocated_bytes_that_differ_from_the_policy_are_a_problem() -> None:
    engine = fake_engine(SAMPLES)
    assert wrong_allocation(engine) == ""
    for part, problem in {
        "pool_bytes": "1024 bytes a token are allocated, the policy claims 128",
        "exact_bytes": "65536 bytes are allocated for the exact tokens, the policy claims 0 each",
        "window_bytes": "65536 bytes are allocated for the window, the policy claims 0",
    }.items():
        memory = replace(fake_engine(SAMPLES).memory(), **{part: 65536})
        engine.memory = lambda memory=memory: memory  # type: ignore[misc,method-assign]
        assert wrong_allocation(engine) == problem


def test_a_verdict_names_the_limits_that_it_covers() -> None:
    cases: list[tuple[dict[str, float], str]] = [
        ({}, "batch 32, 11 decoded (320 in the stress test), with forks"),
        ({"together": 65}, "batch 32, 11 decoded (320 in the stress test), with forks"),  # every offset of a page was visited
        ({"together": 64}, "batch 2, 11 decoded (320 in the stress test), with forks"),
        ({"turns": 3}, "batch 32, 11 decoded (320 in the stress test), with turns and forks"),
        ({"forks": 0, "decoded": 400}, "batch 32, 11 decoded (400 in the stress test), with forks"),
        ({"decoded": 11}, "batch 32, 11 decoded, with forks"),
        ({"decoded": 11, "share": 0.124}, "batch 32, 11 decoded, with forks (12 % of the stress test)"),
    ]
    for changes, covered in cases:
        outcome = verdict(every_class(), coverage=exercised(), tests=engine_tests(stress_result(**changes)))
        assert (outcome.status, outcome.covered) == ("PASS", f"up to 68 tokens, {covered}")


def test_a_reduced_stress_test_states_its_share() -> None:
    for share, ending in ((1.0, " requests"), (0.125, " requests; reduced to 12 % of the test, because the questions are few")):
        (check,) = lines("stress_test", report([], tests=engine_tests(stress_result(share=share))))
        assert check.reason.endswith(ending)


def test_an_engine_may_allow_the_length_that_its_samples_require() -> None:
    """Limits are rounded up to pages of 64 tokens: 591 tokens (with the longest allowed answer) allow 640."""
    assert Limits.of_bundle({"backend": "onnxruntime"}) == Limits()
    judged = Limits.of_bundle({"max_batch": 16, "max_tokens": 574}).model_copy(update={"room": 591})
    assert judged.exceeded_by(Limits(tokens=640)) is None
    more = str(judged.exceeded_by(Limits(tokens=704)))
    assert "allows 704 tokens: build it for 640, or judge it with workloads.lengths=[704] (15 documents, 10,560 tokens" in more
    assert "allows 640 tokens: build it for 576" in str(Limits(tokens=574, batch=16).exceeded_by(Limits(tokens=640)))


def judge_conformance(candidate: EngineConformance, **options: Any) -> list[tuple[str, str]]:
    """Return the status and reason for the baseline and for the candidate."""
    record = conformance(candidate, **options)
    return [(check.status, check.reason) for check in lines("conformance", report([], conformance=record))]


DEVIATION = Deviation(
    sample="x", position=81, page_offset=17, batch_row=3, batch_size=16, operation="stored", layer=2, side="key", head=1
)
COARSE = compared(kl=1e-12 * 9.5**2)
BETWEEN = engine_conformance(compared(kl=1.1e-12 * (1.5 * ALLOWED) ** 2))


@pytest.mark.parametrize(
    ("candidate", "options", "status", "reason"),
    [
        (SOUND_ENGINE, {}, "PASS", "of the allowed error)"),
        (BETWEEN, {}, "FAIL", "1 of 1 requests"),
        (
            engine_conformance(*BETWEEN.requests, limit=allowed([COARSE])),
            {"baseline": engine_conformance(COARSE)},
            "PASS",
            "as the reference engine does",
        ),
        (
            engine_conformance(compared(kl=1e-2)),
            {"rounding": None},
            "PASS",
            "int8 uses its own arithmetic; the distance is reported, not judged: KL 1.0e-02 from the reference engine",
        ),
        (engine_conformance(compared(kl=None)), {"rounding": None}, "PASS", "KL inf from the reference engine, at most inf"),
        (engine_conformance(), {}, "INCONCLUSIVE", "workloads.conformance_samples"),
        (
            engine_conformance(compared(kl=1e-2), deviation=DEVIATION),
            {},
            "FAIL",
            "candidate: does not compute int8, first stored wrong at position 81 (page offset 17, row 3 of a "
            "batch of 16) of sample x, layer 2 head 1 keys; 1 of 1 requests",
        ),
    ],
    ids=["sound", "deviates", "coarse baseline", "own arithmetic", "not finite", "not compared", "place of the deviation"],
)
def test_a_candidate_is_judged_by_roundings(
    candidate: EngineConformance, options: dict[str, Any], status: str, reason: str
) -> None:
    (_, (candidate_status, candidate_reason)) = judge_conformance(candidate, **options)
    assert candidate_status == status
    assert reason in candidate_reason


@pytest.mark.parametrize(
    "fault",
    [
        {"kl": 1e-7},
        {"kl": None},
        {"stored": 3e-3},
        {"mean": 1e-3},
        {"stored": None},
        {"problem": "layer 0 keys take 128 bytes"},
    ],
    ids=str,
)
def test_a_single_faulty_request_fails_an_engine(fault: dict[str, Any]) -> None:
    faulty = engine_conformance(*SOUND_ENGINE.requests, compared(**fault))
    assert [status for status, _ in judge_conformance(faulty)] == ["PASS", "FAIL"]
    assert judge_conformance(SOUND_ENGINE, baseline=faulty)[0][0] == "FAIL"
    assert "1 of 7 requests" in judge_conformance(faulty)[1][1]


def test_the_allowed_distance_grows_with_the_baselines_distance() -> None:
    assert ALLOWED < allowed([COARSE]) < 10 * ALLOWED
    assert allowed([]) == ALLOWED
    assert allowed([compared(kl=None)]) == ALLOWED**2


Scales = dict[Side, tuple[float, ...]]
BOTH = {0: [Side.KEY, Side.VALUE]}
CARRIED: Scales = {Side.KEY: (0.25,), Side.VALUE: (0.5,)}


def layer(carried: Scales, key: tuple[float, ...], value: tuple[float, ...]) -> list[LayerDelivery]:
    return [LayerDelivery(carried, {Side.KEY: key, Side.VALUE: value})]


@pytest.mark.parametrize(
    ("carried", "key", "value", "kinds"),
    [
        (CARRIED, (0.25,), (0.5,), []),
        ({Side.KEY: (0.2503,), Side.VALUE: (0.5,)}, (0.25,), (0.5,), []),  # rounded to bfloat16
        (CARRIED, (0.251,), (0.5,), ["changed"]),
        ({Side.VALUE: (0.5,)}, (1.0,), (0.5,), ["missing"]),
        (CARRIED, (1.0,), (1.0,), ["defaulted", "defaulted"]),
        (CARRIED, (0.5,), (0.5,), ["merged"]),
        ({Side.KEY: (0.25, 0.75), Side.VALUE: (0.5, 0.5)}, (0.75,), (0.5,), ["merged", "merged"]),
        (CARRIED, (0.5,), (0.25,), ["swapped", "swapped"]),
        (CARRIED, (0.3,), (0.5,), ["changed"]),
    ],
)
def test_scale_changes_are_classified(
    carried: Scales, key: tuple[float, ...], value: tuple[float, ...], kinds: list[ScaleChangeKind]
) -> None:
    delivered = layer(carried, key, value)
    assert [change.kind for change in scale_changes(delivered, BOTH)] == kinds
    assert scale_changes(delivered, {0: []}) == [], "sides without static scales are ignored"


MERGED = scale_changes(layer(CARRIED, (0.5,), (0.5,)), BOTH)


@pytest.mark.parametrize(
    ("changes", "allowed", "status", "reason"),
    [
        ([], [], "PASS", "candidate: scales: the engine uses the scales that its checkpoint carries"),
        (MERGED, ["defaulted"], "FAIL",
         "candidate: scales: 1 merged (layer 0 keys: 0.25 was merged with others to the largest, 0.5)"),
        (MERGED, ["merged"], "WARNING", f"candidate: scales: {describe_changes(MERGED)}, as gates.allow_scale_changes accepts"),
    ],
)  # fmt: skip
def test_scale_changes_fail_or_warn_if_allowed(changes: list[object], allowed: list[str], status: str, reason: str) -> None:
    (line,) = lines("scale_delivery", report([], scale_changes=changes), thresholds=gates(allow_scale_changes=allowed))
    assert (line.status, line.reason) == (status, reason)


def distance(kl: float, layers: tuple[float, ...] = ()) -> Distance:
    return Distance(kl_mean=kl, kl_max=kl, stored_error=0.0, stored_by_layer=layers)


def test_the_rounding_is_measured_on_the_baseline() -> None:
    """The baseline's KL is 1/16 of the assumed KL, so its rounding is 1/4."""
    assumed = distance(1.6e-4)
    baseline = engine_conformance(*(compared(engine=distance(kl), rounding=assumed) for kl in (1e-5, 1e-6)))
    reference = ReferenceEngine(None, ROUNDING["bfloat16"], measures_rounding=True)  # type: ignore[arg-type]
    assert reference.rounding == ROUNDING["bfloat16"]
    assert reference.with_limits_of(baseline).rounding == pytest.approx(ROUNDING["bfloat16"] / 4, rel=1e-3)
    exact = engine_conformance(compared(engine=distance(0.0), rounding=assumed))
    assert reference.with_limits_of(exact).rounding == ROUNDING["bfloat16"] * MIN_MEASURED
    unmeasured = ReferenceEngine(None, ROUNDING["bfloat16"])  # type: ignore[arg-type]
    assert unmeasured.with_limits_of(baseline).rounding == unmeasured.rounding


def test_a_layer_with_twice_the_16_bit_storage_error_deviates() -> None:
    rounding = distance(1e-4, (0.004, 0.010))
    engines = (distance(1e-4, layers) for layers in ((0.001, 0.003), (0.0255, 0.0255)))
    sound, truncating = (compared(engine=engine, rounding=rounding) for engine in engines)
    assert sound.times_allowed(4.0) < 1
    assert truncating.times_allowed(4.0) == pytest.approx(0.0255 / allowed_in_layer(0.004))
    assert truncating.times_allowed(4.0) > 3
