"""Truncated distributions: their sizes, their files, and their KL, a lower bound of the KL over the vocabulary."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from stages.evaluate.distances.distance import (
    MIN_CAP,
    REST_MASS,
    TOP_K,
    Distributions,
    LogProbs,
    SampleLogProbs,
    TokenStatistics,
    compare_logprobs,
    kl_of_logits,
    stored_logprobs,
    truncate_row,
    write_logprobs,
)

Logits = np.ndarray


def random_logits(rows: int, vocab: int, spread: float, seed: int) -> Logits:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(np.float32)


def all_logprobs(logits: Logits, token: int = 0) -> list[LogProbs]:
    distributions = Distributions(logits)
    return [truncate_row(distributions, row, token) for row in range(len(logits))]


def compare(baseline: Logits, candidate: Logits, token: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the statistics of the full distributions and of the truncated ones, each (rows, statistics)."""
    logprobs, distributions = all_logprobs(baseline, token), Distributions(candidate)
    greedy = candidate.argmax(axis=1).tolist()
    compared = [compare_logprobs(stored, distributions, row, token, greedy[row]) for row, stored in enumerate(logprobs)]
    full = log_softmax(baseline.astype(np.float64), axis=1).astype(np.float32)  # as precise as stored log-probabilities
    p, q = (log_softmax(logits.astype(np.float64), axis=1) for logits in (full, candidate))
    # Sort by logits, because different logits may round to equal log-probabilities.
    top_tokens = [[set(np.argsort(-row, kind="stable")[:TOP_K].tolist()) for row in rows] for rows in (baseline, candidate)]
    overlap = [len(a & b) / len(a) for a, b in zip(*top_tokens, strict=True)]
    same = baseline.argmax(axis=1) == candidate.argmax(axis=1)
    return np.stack([kl_of_logits(full, candidate), -p[:, token], -q[:, token], same, overlap], axis=1), np.array(compared)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([3, 10, 128, 1024, 3000, 20_000]),
    st.sampled_from([0.05, 1.0, 3.0, 12.0]),
    st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
    st.integers(0, 1000),
)
def test_the_truncated_kl_is_at_most_the_full_kl(vocab: int, spread: float, change: float, seed: int) -> None:
    baseline = random_logits(4, vocab, spread, seed)
    candidate = baseline + random_logits(4, vocab, change, seed + 1)
    full, truncated = compare(baseline, candidate, token=seed % vocab)
    assert (truncated[:, 0] <= full[:, 0] + 1e-9).all()
    assert (truncated[:, 0] >= 0).all()
    # All other statistics are equal up to the float32 rounding of stored values.
    np.testing.assert_allclose(truncated[:, 1:], full[:, 1:], rtol=1e-6, atol=1e-6)
    if vocab <= MIN_CAP and all(stored.rest == 0 for stored in all_logprobs(baseline)):
        np.testing.assert_allclose(truncated[:, 0], full[:, 0], atol=1e-9)


def test_a_flat_distribution_keeps_more_tokens_than_a_peaked_one() -> None:
    vocab = 49_152
    flat, peaked = all_logprobs(np.stack([random_logits(1, vocab, 1.0, 3)[0], random_logits(1, vocab, 12.0, 4)[0]]))
    assert len(flat.tokens) == vocab // 8
    assert TOP_K <= len(peaked.tokens) < 2000
    assert peaked.rest <= REST_MASS
    one_hot = np.zeros((1, vocab), np.float32)
    one_hot[0, 7] = 100
    (certain,) = all_logprobs(one_hot)
    assert len(certain.tokens) == TOP_K
    assert certain.tokens[0] == 7
    full, truncated = compare(random_logits(1, 5000, 0.1, 6), 4 * one_hot[:, :5000] - 200, token=7)
    assert 50 < truncated[0, 0] < full[0, 0] < 1000, "the KL of a nearly certain candidate is finite"
    (equal,) = all_logprobs(np.zeros((1, vocab), np.float32))
    assert equal.tokens.tolist() == list(range(vocab // 8))
    # no token is kept after the rest has fallen below REST_MASS
    rest = 1 - np.exp(peaked.logp.astype(np.float64)).cumsum()
    assert (rest[:-1] > REST_MASS * 0.999).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_non_finite_logit_is_nan_and_affects_no_other_row(value: float) -> None:
    baseline = random_logits(3, 2000, 3.0, 7)
    broken = baseline.copy()
    broken[1, 1500] = value
    distributions = Distributions(broken)
    greedy = [-1 if row == 1 else int(broken[row].argmax()) for row in range(3)]
    logprobs = all_logprobs(baseline)
    rows = [compare_logprobs(stored, distributions, row, 0, greedy[row]) for row, stored in enumerate(logprobs)]
    assert rows[1] == pytest.approx(TokenStatistics(np.nan, rows[1].baseline_nll, *[np.nan] * 3), nan_ok=True)
    assert np.isfinite(rows[1].baseline_nll)
    assert max(rows[0].kl, rows[2].kl) < 1e-11
    stored = all_logprobs(broken)[1]
    assert np.isnan([stored.reference, stored.rest, float(stored.logp[0])]).all()
    recompared = compare_logprobs(stored, Distributions(baseline), 1, 0, 0)
    assert np.isnan([recompared.kl, recompared.baseline_nll]).all()


@pytest.mark.parametrize(("vocab", "dtype"), [(3000, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_logprobs_are_stored_and_read_by_sample(vocab: int, dtype: type, tmp_path: Path) -> None:
    logits = np.concatenate([random_logits(3, vocab, 9.0, 8), random_logits(2, vocab, 1.0, 9)])
    distributions = Distributions(logits)
    recorded = [truncate_row(distributions, row, 4) for row in range(5)]
    path = tmp_path / "logprobs.safetensors"
    write_logprobs(path, {"a/b": SampleLogProbs.concatenate(recorded), "c": SampleLogProbs.concatenate(recorded[:1])})
    stored = stored_logprobs(path)("a/b")
    assert stored.tokens.dtype == dtype
    for position, written in enumerate(recorded):
        read = stored.at(position)
        np.testing.assert_array_equal(read.tokens, written.tokens)
        np.testing.assert_array_equal(read.logp, written.logp)
        assert (read.rest, read.reference) == (written.rest, written.reference)
    assert stored_logprobs(path)("c").at(0).rest == recorded[0].rest


def test_statistics_of_a_small_example() -> None:
    baseline, candidate = (np.log(np.array([row], np.float32)) for row in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    expected = [0.25 * np.log(2), np.log(2), np.log(4), 0, 1]
    for statistics in compare(baseline, candidate):
        np.testing.assert_allclose(statistics[0], expected, atol=1e-6)
