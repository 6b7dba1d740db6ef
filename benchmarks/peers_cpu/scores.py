"""From logits on the decode path to KL divergence and perplexity, against the same peer's float cache."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

Score = dict[str, float]
"""Sums over the scored tokens: "tokens", "kl", "nll", "baseline_nll", "same_top"."""


def score(logits: npt.NDArray[np.float32], baseline: npt.NDArray[np.float32], targets: Sequence[int]) -> Score:
    """Return the sums of one text's forced decode.

    Args:
        logits: (N, V) of the format that is judged.
        baseline: (N, V) of the same peer's float cache.
        targets: The N tokens that follow.

    Raises:
        ValueError: A logit is not finite.
    """
    if not (np.isfinite(logits).all() and np.isfinite(baseline).all()):
        raise ValueError("a logit is not finite")
    rows = np.arange(len(targets))
    log_q: npt.NDArray[np.float64] = log_softmax(logits.astype(np.float64), axis=-1)
    log_p: npt.NDArray[np.float64] = log_softmax(baseline.astype(np.float64), axis=-1)
    return {
        "tokens": len(targets),
        "kl": float((np.exp(log_p) * (log_p - log_q)).sum()),
        "nll": float(-log_q[rows, targets].sum()),
        "baseline_nll": float(-log_p[rows, targets].sum()),
        "same_top": float((log_q.argmax(-1) == log_p.argmax(-1)).sum()),
    }


def summary(scores: Sequence[Score]) -> dict[str, float]:
    """Return means over all scored tokens of some texts: KL in nats, perplexities, their ratio, agreement of the top token."""
    total = {key: sum(one[key] for one in scores) for key in scores[0]}
    count = total["tokens"]
    return {
        "scored_tokens": count,
        "mean_kl": total["kl"] / count,
        "ppl": math.exp(total["nll"] / count),
        "ppl_ratio": math.exp((total["nll"] - total["baseline_nll"]) / count),
        "same_top": total["same_top"] / count,
    }
