"""What servers show of two distributions gives a lower bound of their KL, and the exact figures of what is shown."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engines.openai.engine import Shown
from stages.evaluate.distances.distance import kl_of_logits, log_softmax
from stages.evaluate.servers.served import LEAST_REST, compare_shown, head_of_shown

VOCAB = 200


def rows(seed: int, distance: float, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=VOCAB, scale=spread)
    return exact.astype(np.float32), (exact + rng.normal(size=VOCAB, scale=distance)).astype(np.float32)


def shown(row: np.ndarray, top: int, token: int) -> Shown:
    logp = log_softmax(row[None])[0]
    likely = [*np.argsort(-logp, kind="stable")[:top].tolist(), token]
    return Shown({int(t): float(logp[t]) for t in likely}, 10, None)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), distance=st.floats(0, 4), top=st.integers(10, 40), token=st.integers(0, VOCAB - 1))
def test_the_kl_of_what_is_shown_never_exceeds_that_of_the_vocabulary(seed: int, distance: float, top: int, token: int) -> None:
    exact, other = rows(seed, distance)
    values, mass = compare_shown(head_of_shown(shown(exact, top, token), token), shown(other, top, token), token)
    (whole,) = kl_of_logits(exact[None], other[None])
    assert 0 <= values[0] <= whole + 10 * LEAST_REST
    assert 0 < mass <= 1


def test_the_bound_is_tight_where_all_of_the_mass_is_shown() -> None:
    exact, other = rows(1, 0.3, spread=8.0)
    values, mass = compare_shown(head_of_shown(shown(exact, 40, 7), 7), shown(other, 40, 7), 7)
    assert mass > 0.999
    assert values[0] == pytest.approx(kl_of_logits(exact[None], other[None])[0], rel=0.02)


def test_the_forced_tokens_own_figures_are_exact_however_unlikely_it_is() -> None:
    exact, other = rows(2, 1.0)
    token = int(np.argmin(exact))
    (_, before, after, top1, top10, delta), _ = compare_shown(
        head_of_shown(shown(exact, 12, token), token), shown(other, 12, token), token
    )
    one, two = log_softmax(exact[None])[0], log_softmax(other[None])[0]
    assert before == pytest.approx(-one[token])
    assert after == pytest.approx(-two[token])
    assert delta == pytest.approx(np.exp(two[token]) - np.exp(one[token]))
    ten = [set(np.argsort(-row)[:10].tolist()) for row in (one, two)]
    assert top10 == len(ten[0] & ten[1]) / 10
    assert top1 == float(one.argmax() == two.argmax())


def test_what_is_not_finite_is_no_number() -> None:
    exact, _ = rows(4, 0.0)
    broken = Shown({1: float("nan"), 2: -1.0}, 10, None)
    sound = head_of_shown(shown(exact, 20, 2), 2)
    for head, candidate in ((sound, broken), (head_of_shown(broken, 2), shown(exact, 20, 2))):
        values, mass = compare_shown(head, candidate, 2)
        assert np.isnan([values[0], mass]).all()
