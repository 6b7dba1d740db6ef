"""How often bounds of a mean distance pass a candidate exactly at its threshold, on shapes that real KV caches have.

    python -m benchmarks.gate_distances          # the figures of docs/verdict.md on distances, about two minutes

A shape (`benchmarks.gate_shapes`) is scaled until the mean of its documents, each cut at `distances.OUTLIER` times the limit,
is the limit: a PASS is wrong there. Documents are drawn from it with replacement. Power is of the shapes as they were measured.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from benchmarks.gate_shapes import Shape, load
from pipeline.statistics.bets import OUTLIER
from pipeline.statistics.bounds import SHARES_FOR_PASS, Array
from pipeline.verdict.gates import Gates

GATES = Gates()
SOUND = ("fp8", "int8", "fp8k_int4v")
RUNS, REPLICATES = 1000, 500
SEED = 20_261_122

Bound = Callable[[Array, float, float], Array]
"""(values (runs, documents), alpha, largest value) -> the upper bound of the mean in each run."""


def scaled(values: Array, limit: float, cut: float) -> Array | None:
    """Return `values` times the factor with which their mean is `limit` when each is cut at `cut`; None where there is none."""
    if float((values > 0).mean()) * cut <= limit:
        return None
    factor = math.exp(brentq(lambda log: float(np.minimum(math.exp(log) * values, cut).mean()) - limit, -40, 80))
    return np.asarray(factor * values)


def betting(values: Array, alpha: float, worst: float, limit: float) -> Array:
    """Return in which runs the gates' bet shows that the mean is below the limit (`pipeline.statistics.bounds`)."""
    gains = (limit - values) / (worst - limit)
    logs = [np.log1p(share * gains).sum(axis=1) for share in SHARES_FOR_PASS]
    return np.asarray(np.logaddexp.reduce(logs) - math.log(len(logs)) >= -math.log(alpha))


def _draws(count: int) -> Array:
    rng = np.random.default_rng(SEED)
    return rng.multinomial(count, np.full(count, 1 / count), size=REPLICATES).astype(np.float64) / count


def percentile_bootstrap(values: Array, alpha: float, _worst: float) -> Array:
    return np.asarray(np.quantile(values @ _draws(values.shape[1]).T, 1 - alpha, axis=1))


def bca_bootstrap(values: Array, alpha: float, _worst: float) -> Array:
    replicates, means = values @ _draws(values.shape[1]).T, values.mean(axis=1, keepdims=True)
    shift = ndtri(np.clip((replicates < means).mean(axis=1), 1e-3, 1 - 1e-3))
    residuals = values - means
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = np.nan_to_num((residuals**3).sum(axis=1) / (6 * (residuals**2).sum(axis=1) ** 1.5))
    z = shift + ndtri(1 - alpha)
    levels = ndtr(shift + z / np.maximum(1 - skew * z, 1e-6))
    return np.array([np.quantile(row, level) for row, level in zip(replicates, levels, strict=True)])


def studentized_bootstrap(values: Array, alpha: float, _worst: float) -> Array:
    weights = _draws(values.shape[1])
    means, errors = values.mean(axis=1, keepdims=True), values.std(axis=1, keepdims=True)
    replicates = values @ weights.T
    spreads = np.sqrt(np.maximum((values**2) @ weights.T - replicates**2, 1e-300))
    t = (replicates - means) / np.maximum(spreads, 1e-12 + 1e-9 * errors)
    return np.asarray(means[:, 0] - np.quantile(t, alpha, axis=1) * errors[:, 0])


def maurer_pontil(values: Array, alpha: float, worst: float) -> Array:
    """The empirical Bernstein bound (Maurer and Pontil, COLT 2009)."""
    count, log = values.shape[1], math.log(2 / alpha)
    return np.asarray(
        values.mean(axis=1) + np.sqrt(2 * values.var(axis=1, ddof=1) * log / count) + 7 * worst * log / (3 * (count - 1))
    )


def gaffke(values: Array, alpha: float, worst: float) -> Array:
    """A Bayesian bootstrap with one more document at the worst value (Gaffke 2005; Learned-Miller and Thomas 2020)."""
    weights = np.random.default_rng(SEED).exponential(size=(REPLICATES, values.shape[1] + 1))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(np.quantile(values @ weights[:, :-1].T + worst * weights[:, -1], 1 - alpha, axis=1))


BOUNDS: dict[str, Bound] = {
    "percentile bootstrap": percentile_bootstrap,
    "BCa bootstrap": bca_bootstrap,
    "studentized bootstrap": studentized_bootstrap,
    "empirical Bernstein": maurer_pontil,
    "Gaffke": gaffke,
}


def passes(name: str, values: Array, limit: float, worst: float, alpha: float = GATES.alpha) -> float:
    """Return the share of runs that pass by one of BOUNDS, or by the gates' bet, which has the name "betting"."""
    if name == "betting":
        return float(betting(values, alpha, worst, limit).mean())
    return float((BOUNDS[name](values, alpha, worst) <= limit).mean())


def drawn(values: Array, count: int, rng: np.random.Generator, runs: int = RUNS) -> Array:
    return rng.choice(values, size=(runs, count))


def worst_and_power(name: str, shapes: Sequence[Shape], count: int, *, cut: bool = True) -> tuple[float, float]:
    """Return the largest share of wrong passes at the threshold of the mean KL, and the least power for a sound engine."""
    rng, limit = np.random.default_rng(SEED), GATES.max_mean_kl
    worst, wrong, power = OUTLIER * limit, 0.0, 1.0
    for shape in shapes:
        kl = shape.values["mean_kl"]
        at_limit = scaled(kl, limit, worst if cut else math.inf)
        if at_limit is not None:
            values = drawn(at_limit, count, rng)
            wrong = max(wrong, passes(name, np.minimum(values, worst) if cut else values, limit, worst))
        if shape.policy in SOUND:
            power = min(power, passes(name, np.minimum(drawn(kl, count, rng), worst), limit, worst))
    return wrong, power


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="24,144,576", help="documents of a workload")
    arguments = parser.parse_args(command_line)
    counts, shapes = [int(count) for count in arguments.documents.split(",")], load()
    print("Mean KL at its threshold: wrong PASS of the worst shape / least PASS of a sound engine, in %\n")
    print(f"| bound | {' | '.join(f'{count} documents' for count in counts)} |\n|---|{'---|' * len(counts)}")
    for name, cut in [("percentile bootstrap", False), *((name, True) for name in [*BOUNDS, "betting"])]:
        cells = [worst_and_power(name, shapes, count, cut=cut) for count in counts]
        label = name if cut else f"{name} of uncut means (rules 2)"
        print(f"| {label} | {' | '.join(f'{100 * wrong:.1f} / {100 * power:.1f}' for wrong, power in cells)} |", flush=True)


if __name__ == "__main__":
    main()
