"""Distances between distributions of which servers show their most likely tokens alone.

Both are coarsened to the same outcomes: each token that both servers show, and all others as one. No such map raises the KL
(the data processing inequality), so that what is computed here is a lower bound of the KL over the vocabulary.
"""

import numpy as np

from stages.engines.openai.engine import Shown
from stages.evaluate.distances.distance import TOP_K, Array, Head

LEAST_REST = 1e-6
"""Probability below which what is left of shown ones is rounding: servers compute log-probabilities in float32."""

NOT_FINITE = -1


def head_of_shown(shown: Shown, token: int) -> Head:
    """Return what is stored of a distribution of the baseline; everything is NaN where a number is not finite.

    Args:
        shown: What the server shows; the forced token, which may be an unlikely one, is among it.
        token: The forced token.
    """
    likely = _likely(shown)
    logp = np.array([shown.logp[name] for name in likely], np.float64)
    if not np.isfinite(logp).all():
        return Head(np.zeros(1, np.uint32), np.full(1, np.nan, np.float32), np.nan, np.nan, None)
    rest = max(1.0 - float(np.exp(logp).sum()), LEAST_REST)
    return Head(np.array(likely, np.uint32), logp.astype(np.float32), rest, shown.logp[token], None)


def compare_shown(head: Head, shown: Shown, token: int) -> tuple[tuple[float, ...], float]:
    """Compare what a candidate shows with the baseline's head.

    Args:
        head: What is stored of the baseline.
        shown: What the candidate shows.
        token: The forced token.

    Returns:
        The values of StepStatistics, in its order, and the probability, by the baseline, of the tokens that both show.
    """
    likely = _likely(shown)
    if not np.isfinite([shown.logp[name] for name in likely]).all() or not np.isfinite(head.reference):
        return (np.nan, -head.reference, np.nan, np.nan, np.nan, np.nan, NOT_FINITE), np.nan
    before = dict(zip(head.tokens.tolist(), head.logp.astype(np.float64).tolist(), strict=True))
    common = [name for name in before if name in shown.logp]
    p, mass = _coarse([before[name] for name in common])
    q, _ = _coarse([shown.logp[name] for name in common])
    kl = float((np.exp(p) * (p - q)).sum())
    ten = head.tokens[:TOP_K].tolist()
    reference = shown.logp[token]
    values = (
        max(kl, 0.0),
        -head.reference,
        -reference,
        float(ten[0] == likely[0]),
        len({*ten} & {*likely[:TOP_K]}) / len(ten),
        float(np.exp(reference) - np.exp(head.reference)),
        likely[0],
    )
    return values, mass


def _likely(shown: Shown) -> list[int]:
    """Return the tokens, most likely first; the smaller id of equals."""
    return sorted(shown.logp, key=lambda name: (-shown.logp[name], name))


def _coarse(logp: list[float]) -> tuple[Array, float]:
    """Return log-probabilities of some tokens and of all others together, which sum to 1; and the probability of the former."""
    named = np.array(logp, np.float64)
    mass = float(np.exp(named).sum())
    outcomes = np.append(named, np.log(max(1.0 - mass, LEAST_REST)))
    return outcomes - np.log(np.exp(outcomes).sum()), min(mass, 1.0)
