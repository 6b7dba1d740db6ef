"""Truncated distributions: their lengths, and that their KL is a lower bound of the KL over the vocabulary."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.evaluate.distances.distance import (
    MIN_CAP,
    REST_MASS,
    TOP_K,
    Distributions,
    LogProbs,
    SampleLogProbs,
    compare_logprobs,
    kl_of_logits,
    log_softmax,
    logprobs_of,
    stored_logprobs,
    write_logprobs,
)

Logits = np.ndarray


def random_logits(rows: int, vocab: int, spread: float, seed: int) -> Logits:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(np.float32)


def all_logprobs(logits: Logits, token: int = 0) -> list[LogProbs]:
    distributions = Distributions(logits)
    return [logprobs_of(distributions, row, token) for row in range(len(logits))]


def both(baseline: Logits, candidate: Logits, token: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the statistics over the vocabulary and truncated, (rows, statistics)."""
    logprobs, distributions = all_logprobs(baseline, token), Distributions(candidate)
    rows = np.array([
        compare_logprobs(stored, distributions, row, token, int(candidate[row].argmax())) for row, stored in enumerate(logprobs)
    ])  # fmt: skip
    full = log_softmax(baseline).astype(np.float32)  # as precise as stored log-probabilities
    p, q = log_softmax(full), log_softmax(candidate)
    # The order is that of the logits: rounded log-probabilities may be equal where logits differ.
    tens = [[set(np.argsort(-row, kind="stable")[:TOP_K].tolist()) for row in logits] for logits in (baseline, candidate)]
    overlap = [len(one & other) / len(one) for one, other in zip(*tens, strict=True)]
    same, chance = baseline.argmax(axis=1) == candidate.argmax(axis=1), np.exp(q[:, token]) - np.exp(p[:, token])
    return np.stack([kl_of_logits(full, candidate), -p[:, token], -q[:, token], same, overlap, chance], axis=1), rows


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([3, 10, 128, 1024, 3000, 20_000]),
    st.sampled_from([0.05, 1.0, 3.0, 12.0]),
    st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
    st.integers(0, 1000),
)
def test_the_kl_over_heads_is_at_most_that_over_the_vocabulary(vocab: int, spread: float, change: float, seed: int) -> None:
    baseline = random_logits(4, vocab, spread, seed)
    candidate = baseline + random_logits(4, vocab, change, seed + 1)
    whole, logprobs = both(baseline, candidate, token=seed % vocab)
    assert (logprobs[:, 0] <= whole[:, 0] + 1e-9).all()
    assert (logprobs[:, 0] >= 0).all()
    # All other statistics are equal up to the float32 rounding of stored values.
    np.testing.assert_allclose(logprobs[:, 1:], whole[:, 1:], rtol=1e-6, atol=1e-6)
    if vocab <= MIN_CAP and all(stored.rest == 0 for stored in all_logprobs(baseline)):
        np.testing.assert_allclose(logprobs[:, 0], whole[:, 0], atol=1e-9)


def test_a_head_is_as_long_as_its_distribution_is_wide() -> None:
    vocab = 49_152
    flat, peaked = all_logprobs(np.stack([random_logits(1, vocab, 1.0, 3)[0], random_logits(1, vocab, 12.0, 4)[0]]))
    assert len(flat.tokens) == vocab // 8
    assert TOP_K <= len(peaked.tokens) < 2000
    assert peaked.rest <= REST_MASS
    one = np.zeros((1, vocab), np.float32)
    one[0, 7] = 100
    (sure,) = all_logprobs(one)
    assert len(sure.tokens) == TOP_K
    assert sure.tokens[0] == 7
    whole, logprobs = both(random_logits(1, 5000, 0.1, 6), 4 * one[:, :5000] - 200, token=7)
    assert 50 < logprobs[0, 0] < whole[0, 0] < 1000, "a candidate that is surer than the baseline has a finite distance"
    (equal,) = all_logprobs(np.zeros((1, vocab), np.float32))
    assert equal.tokens.tolist() == list(range(vocab // 8))
    # the kept tokens end with the first token that brings the rest below the bound
    left = 1 - np.exp(peaked.logp.astype(np.float64)).cumsum()
    assert (left[:-1] > REST_MASS * 0.999).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_is_nan_and_affects_no_other_row(value: float) -> None:
    baseline = random_logits(3, 2000, 3.0, 7)
    broken = baseline.copy()
    broken[1, 1500] = value
    distributions = Distributions(broken)
    greedy = [-1 if row == 1 else int(broken[row].argmax()) for row in range(3)]
    logprobs = all_logprobs(baseline)
    rows = np.array([compare_logprobs(stored, distributions, row, 0, greedy[row]) for row, stored in enumerate(logprobs)])
    assert np.isnan(rows[1, [0, 2, 3, 4, 5]]).all()
    assert (rows[[0, 2], 0] < 1e-11).all()
    stored = all_logprobs(broken)[1]
    assert np.isnan([stored.reference, stored.rest, float(stored.logp[0])]).all()
    recompared = compare_logprobs(stored, Distributions(baseline), 1, 0, 0)
    assert np.isnan([recompared[0], recompared[1]]).all()


@pytest.mark.parametrize(("vocab", "dtype"), [(3000, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_heads_are_stored_and_read_back_by_sample(vocab: int, dtype: type, tmp_path: Path) -> None:
    logits = np.concatenate([random_logits(3, vocab, 9.0, 8), random_logits(2, vocab, 1.0, 9)])
    distributions = Distributions(logits)
    recorded = [logprobs_of(distributions, row, 4) for row in range(5)]
    path = tmp_path / "logprobs.safetensors"
    write_logprobs(path, [("a/b", SampleLogProbs.of(recorded)), ("c", SampleLogProbs.of(recorded[:1]))])
    stored = stored_logprobs(path)("a/b")
    assert stored.tokens.dtype == dtype
    for position, written in enumerate(recorded):
        read = stored.at(position)
        np.testing.assert_array_equal(read.tokens, written.tokens)
        np.testing.assert_array_equal(read.logp, written.logp)
        assert (read.rest, read.reference) == (written.rest, written.reference)
    assert stored_logprobs(path)("c").at(0).rest == recorded[0].rest


def test_statistics_by_hand() -> None:
    baseline, candidate = (np.log(np.array([row], np.float32)) for row in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    expected = [0.25 * np.log(2), np.log(2), np.log(4), 0, 1, -0.25]
    for found in both(baseline, candidate):
        np.testing.assert_allclose(found[0], expected, atol=1e-6)
