"""Samples decoded again: the report's own engines reproduce its numbers, other engines do not."""

import math
import weakref

import pytest
from evaluations import brief_workloads, evaluate, measure_baseline
from fake_engine import CharTokenizer, fake_engine, sharing_engine

from stages.core.records import Sample
from stages.engines.interface import Engine
from stages.evaluate.again import decode_again, difference
from stages.verdict.report import SampleRow, load_rows

CONFIG = brief_workloads(context_bins=[0, 6])
SAMPLES = [Sample(id=f"copy-{i}", workload="copy", prompt=f"c{i:02}", reference=f"a{i}b") for i in range(24)]


def engine(noise: float = 0.0) -> Engine:
    return fake_engine(SAMPLES, noise=noise, batch_noise=1e-4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[SampleRow]:
    """Rows of a candidate whose logits have a little noise."""
    folder = tmp_path_factory.mktemp("again")
    measure_baseline(engine, SAMPLES, folder / "baseline", config=CONFIG)
    evaluate(lambda: engine(0.05), SAMPLES, folder / "baseline", folder / "report", config=CONFIG)
    return load_rows(folder / "report")


def said(rows: list[SampleRow], baseline: Engine, candidate: Engine) -> str | None:
    chosen = [rows[3], rows[17]]
    samples = [SAMPLES[3], SAMPLES[17]]
    own = {row.id: row.own_tokens for row in chosen}
    found = decode_again(lambda: baseline, lambda: candidate, samples, own, CharTokenizer(), CONFIG)
    return difference(chosen, found, 1e-8)


def test_the_same_engines_give_the_recorded_numbers_in_another_batch(rows: list[SampleRow]) -> None:
    assert said(rows, engine(), engine(0.05)) is None


def test_another_candidate_or_another_baseline_gives_others(rows: list[SampleRow]) -> None:
    assert "mean KL of" in str(said(rows, engine(), engine(1.0)))
    assert "mean KL of" in str(said(rows, engine(), engine()))
    assert "decoded again" in str(said(rows, engine(2.0), engine(0.05)))


def test_the_baseline_is_gone_when_the_candidate_is_loaded() -> None:
    baselines = []

    def open_baseline() -> Engine:
        opened = engine()
        baselines.append(weakref.ref(opened))
        return opened

    def open_candidate() -> Engine:
        assert [one() for one in baselines] == [None]
        return engine(0.05)

    assert decode_again(open_baseline, open_candidate, SAMPLES[:2], {}, CharTokenizer(), CONFIG)


def test_numbers_that_are_missing_or_of_nobody_are_different(rows: list[SampleRow]) -> None:
    found = decode_again(engine, lambda: engine(0.05), SAMPLES[3:4], {}, CharTokenizer(), CONFIG)
    assert "sample copy-4 is not in this evaluation" in str(difference([rows[4]], found, 0.0))
    for name in ("mean_kl", "baseline_nll", "candidate_nll"):
        for value in (None, math.nan):
            assert difference([rows[3].model_copy(update={name: value})], found, 0.0) is not None
    for name in ("baseline_probability", "candidate_probability"):
        for value in (None, 0.0):
            forged = rows[3].model_copy(update={name: value})
            assert "decoded again" in str(difference([forged], found, 0.0))
    shifted = rows[3].model_copy(update={"candidate_nll": (rows[3].candidate_nll or 0.0) + 0.5})
    assert "candidate NLL" in str(difference([shifted], found, 0.0))


def test_a_sample_continues_the_prefix_that_it_shared_in_the_evaluation() -> None:
    """Tokens after a shared prefix read it from the quantized cache; tokens in the same prefill do not."""
    page = "p" * 80
    questions = [
        Sample(id=f"copy-{i}", workload="copy", document="page", prompt=f"{page}q{i}?", reference="a") for i in range(3)
    ]
    engines = [sharing_engine(questions) for _ in range(2)]
    decode_again(lambda: engines[0], lambda: engines[1], questions[:1], {}, CharTokenizer(), CONFIG, questions[1:])
    assert [[len(prompt) for prompt in one.prefilled if prompt] for one in engines] == [[81], [81]]
