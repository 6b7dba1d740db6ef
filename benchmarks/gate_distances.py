"""How often the gate on a mean distance passes a candidate exactly at its threshold, on shapes that real KV caches have.

    python -m benchmarks.gate_distances          # the figures of docs/verdict.md on distances

A shape (`benchmarks.gate_shapes`) is scaled until the mean of its documents, each cut at `distances.OUTLIER` times the limit,
is the limit: a PASS is wrong there. Documents are drawn from it with replacement. Power is of the shapes as they were measured.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from benchmarks.gate_shapes import Shape, load
from pipeline.statistics.bets import OUTLIER
from pipeline.statistics.bounds import SHARES_FOR_PASS, Array, log_wealth
from pipeline.verdict.gates import Gates

GATES = Gates()
SOUND = ("fp8", "int8", "fp8k_int4v")
RUNS = 1000
SEED = 20_261_122


def scaled(values: Array, limit: float, cut: float) -> Array | None:
    """Return `values` times the factor with which their mean is `limit` when each is cut at `cut`; None where there is none."""
    if float((values > 0).mean()) * cut <= limit:
        return None
    factor = math.exp(brentq(lambda log: float(np.minimum(math.exp(log) * values, cut).mean()) - limit, -40, 80))
    return np.asarray(factor * values)


def betting(values: Array, alpha: float, worst: float, limit: float) -> Array:
    """Return in which runs the gates' bet shows that the mean is below the limit (`pipeline.statistics.bounds`)."""
    return np.asarray(log_wealth((limit - values) / (worst - limit), SHARES_FOR_PASS) >= -math.log(alpha))


def wrong_and_power(shapes: Sequence[Shape], count: int) -> tuple[float, float]:
    """Return the largest share of wrong passes at the threshold of the mean KL, and the least power for a sound engine."""
    rng, limit = np.random.default_rng(SEED), GATES.max_mean_kl
    worst = OUTLIER * limit

    def passes(kl: Array) -> float:
        drawn = np.minimum(rng.choice(kl, size=(RUNS, count)), worst)
        return float(betting(drawn, GATES.alpha, worst, limit).mean())

    wrong, power = 0.0, 1.0
    for shape in shapes:
        kl = shape.values["mean_kl"]
        at_limit = scaled(kl, limit, worst)
        wrong = wrong if at_limit is None else max(wrong, passes(at_limit))
        power = min(power, passes(kl)) if shape.policy in SOUND else power
    return wrong, power


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="24,144,576", help="documents of a workload")
    counts, shapes = parser.parse_args(command_line).documents.split(","), load()
    print("Mean KL at its threshold: wrong PASS of the worst shape / least PASS of a sound engine, in %\n")
    for count in counts:
        wrong, power = wrong_and_power(shapes, int(count))
        print(f"{count} documents: {100 * wrong:.1f} / {100 * power:.1f}", flush=True)


if __name__ == "__main__":
    main()
