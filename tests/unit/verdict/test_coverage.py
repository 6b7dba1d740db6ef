"""The coverage of an evaluation is counted during decoding, written into verdicts, and limits promotions."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
from fake_engine import EOS, CharTokenizer, fake_engine, sharing_engine
from gate_reports import GATES, every_class, lines, report

from stages.core.records import Sample
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.decode import decode
from stages.evaluate.decoding.free import free_answers
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.inputs.tokens import encode
from stages.verdict.coverage import Exercised, Limits
from stages.verdict.engine_tests import Allocation, EngineTests, FreeAnswers, ProcessMemory, StressResult
from stages.verdict.gates import decide

SAMPLES = [
    Sample(id="short", workload="a", prompt="abc", reference="xy"),
    Sample(id="long", workload="b", prompt="p" * 62, reference="answer"),
    Sample(id="wrong", workload="b", prompt="q" * 10, reference="abcdef"),
]


def exercised() -> Exercised:
    items = encode(SAMPLES, CharTokenizer(), 9)
    events = decode(sharing_engine(SAMPLES, wrong=["wrong"]), items, 2, Greedy((EOS,), 4))
    return Exercised.merged([event.trace for event in events if isinstance(event, SampleResult)])


def test_steps_are_counted_where_they_are_taken() -> None:
    whole = exercised()
    assert whole.longest_context == 62 + len("answer")
    # the answer differs from the reference and continues up to its limit
    assert whole.longest_decode == len("abcdef") + 1 + 4
    assert whole.batch == 2
    assert whole.forks == 1


def test_free_answers_that_forced_decode_contradicts_are_named() -> None:
    engine = fake_engine(SAMPLES)
    items = encode(SAMPLES, CharTokenizer(), 9)
    sound = free_answers(engine, items, 2, Greedy((EOS,), 4))
    assert (sound.samples, sound.contradictions) == (3, [])
    assert engine.live == 0
    generate = engine.generate
    engine.generate = lambda *given, **more: [[*answer[:1], 7, *answer[2:]] for answer in generate(*given, **more)]  # type: ignore[method-assign]
    found = free_answers(engine, items, 2, Greedy((EOS,), 4)).contradictions
    assert len(found) == 3
    assert found[0].startswith("sample short: after 1 free tokens it said 7, which forced decode finds")


def test_only_free_answers_that_decode_steps_did_not_give_are_forced() -> None:
    engine = fake_engine(SAMPLES)
    items = encode(SAMPLES, CharTokenizer(), 9)
    given = engine.generate([item.prompt for item in items], 9, (EOS,))
    other = [*given[0][:1], 7, *given[0][2:]]
    with (
        patch.object(engine, "generate", lambda *_, **__: given),
        patch.object(engine, "decode", Mock(wraps=engine.decode)) as decode,
    ):
        assert not free_answers(engine, items, 2, Greedy((EOS,), 4), decoded=given).contradictions
        assert not decode.called
        free_answers(engine, items, 2, Greedy((EOS,), 4), decoded=[other, None, given[2]])
    first_step = decode.call_args_list[0].args[1]
    assert first_step == [given[0][0], given[1][0]], "the first differs, and of the second nothing is known"


def stress_result(**changes: object) -> StressResult:
    sizes: dict[str, Any] = {"pages": 2, "pool_bytes": 64, "claimed_pool_bytes": 64, "exact_bytes": 0, "exact_unit_bytes": 0}
    values: dict[str, object] = {
        "tokens": 2048, "decoded": 320, "batch": 32, "page_offsets": 64, "forks": 9, "requests": 400, "rows": 9, "failures": [],
        "together": 68, "prompts": 0, "turns": 0, "prefixes": 0,
        "allocation": Allocation(**sizes, window_bytes=0, window_pages=1, window_unit_bytes=0),
    }  # fmt: skip
    return StressResult.model_validate({**values, **changes})


def engine_tests(stress: StressResult | None = None, free: list[str] | None = None) -> EngineTests:
    answers = FreeAnswers(samples=2, tokens=9, contradictions=free or [])
    return EngineTests(free_answers=answers, stress=stress or stress_result())


BAD = stress_result(failures=["fork: fork at 65 tokens: KL 1"])
LARGER = stress_result(allocation=stress_result().allocation.model_copy(update={"pool_bytes": 256}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"pool_bytes": 1024, "claimed_pool_bytes": 256}, "8 bytes a token are allocated, the policy claims 2"),
        ({"exact_bytes": 10, "exact_unit_bytes": 4}, "10 bytes are allocated for the exact tokens, the policy claims 4 each"),
        ({"window_bytes": 8}, "8 bytes are allocated for the window, the policy claims 0"),
    ],
)  # fmt: skip
def test_bytes_are_compared_with_the_policys_claim(changes: dict[str, int], problem: str | None) -> None:
    assert stress_result().allocation.model_copy(update=changes).problem == problem


def test_a_verdict_says_how_far_it_holds() -> None:
    rows = every_class()
    sound = decide(report(rows, coverage=exercised(), tests=engine_tests()), rows, GATES)
    assert (sound.status, sound.covered) == ("PASS", "up to 68 tokens, batch 32, 320 decoded, with forks")


def claim(**changes: Any) -> str:
    found = decide(
        report(every_class(), coverage=exercised(), tests=engine_tests(stress_result(**changes))),
        every_class(),
        GATES,
    )
    assert found.covered is not None
    return found.covered


def test_a_batch_is_claimed_at_the_samples_length_where_several_of_its_sequences_were_as_long() -> None:
    assert claim(together=65) == "up to 68 tokens, batch 32, 320 decoded, with forks", "every offset of a page was visited"
    assert claim(together=64) == "up to 68 tokens, batch 2, 320 decoded, with forks"


def test_what_sequences_did_is_part_of_the_claim() -> None:
    assert claim(turns=3, prefixes=1).endswith("with turns, forks and reused prefixes")
    assert claim(forks=0, decoded=400).startswith("up to 68 tokens, batch 32, 400 decoded")


MIB = 1 << 20


@pytest.mark.parametrize(
    ("grown", "noise", "status", "said"),
    [
        (17 * MIB, 0, "PASS", "bytes match the policy"),
        (26 * MIB, 0, "FAIL", "the process grows by 16.0 MiB more than the policy claims for 8,192 tokens"),
        (26 * MIB, 5 * MIB, "WARNING", "moves by 5.0 MiB by itself, too much to see a float16 copy of 16.0 MiB"),
    ],
)
def test_a_copy_that_no_policy_claims_shows_in_the_process_unless_a_machine_is_noisy(
    grown: int, noise: int, status: str, said: str
) -> None:
    process = ProcessMemory(
        tokens=8192, grown_bytes=grown, grown_again_bytes=0, claimed_bytes=10 * MIB, copy_bytes=16 * MIB, noise_bytes=noise
    )
    grew = stress_result(allocation=stress_result().allocation.model_copy(update={"process": process}))
    check = next(check for check in lines("stress_test", report([], tests=engine_tests(grew))) if check.gate == "allocation")
    assert (check.status, said in check.reason) == (status, True), check.reason


def test_an_engine_may_allow_what_it_had_to_allow_to_be_asked_the_samples() -> None:
    """Whole pages of 64 tokens count: an answer that may have 16 further tokens but ends before needs room for 640."""
    judged = Limits(tokens=574, room=591, batch=16)
    assert judged.exceeded_by(Limits(tokens=640)) is None
    more = str(judged.exceeded_by(Limits(tokens=704)))
    assert "allows 704 tokens: build it for 640, or judge it with workloads.lengths=[704] (15 documents, 10,560 tokens" in more
    assert "allows 640 tokens: build it for 576" in str(Limits(tokens=574, batch=16).exceeded_by(Limits(tokens=640)))


@pytest.mark.parametrize(
    ("record", "limits"),
    [
        ({"backend": "onnxruntime"}, Limits()),
        ({"max_batch": 16, "max_tokens": 4096}, Limits(tokens=4096, batch=16)),
    ],
)
def test_the_limits_of_each_backends_bundle_are_read(record: dict[str, object], limits: Limits) -> None:
    assert Limits.of_bundle(record) == limits
