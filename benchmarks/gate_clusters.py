"""How often the gate on answers passes or fails wrongly where samples share documents whose answers flip together.

    python -m benchmarks.gate_clusters               # the figures of docs/verdict.md on documents, about ten minutes
    python -m benchmarks.gate_clusters --runs 1000

Evaluations of one kind of work are drawn, and the counts and tests of `pipeline.verdict` decide them. rho is the correlation of
two samples' flips in a document. It comes about in two ways, and each figure is of the worse one: a document flips as a whole
with probability rho and otherwise sample by sample, or each document has rates of its own (a beta distribution).
"""

import argparse
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.statistics import paired as st
from pipeline.statistics.looks import planned_looks
from pipeline.verdict.gates import Gates

GATES = Gates()
SIZES = ((40, 4), (160, 4), (20, 8))
"""Documents, and samples of each."""
CORRELATIONS = (0.0, 0.06, 0.1, 0.2, 0.3, 0.5)
AT_MARGIN = ((0.05, 0.0), (0.055, 0.005))
"""Shares of the answers that are lost and gained."""
HARMLESS = (0.005, 0.005)
SEED = 20_261_122

Kind = Literal["whole documents", "own rates"]
KINDS: tuple[Kind, ...] = ("whole documents", "own rates")
Flips = npt.NDArray[np.int64]
"""-1 (lost), 0 or 1 (gained), shape (runs, documents, samples of a document)."""


def drawn(shape: tuple[int, int, int], rates: tuple[float, float], rho: float, kind: Kind) -> Flips:
    """Draw the flips of evaluations in which two samples of a document have the correlation `rho`."""
    rng, (lost, gained) = np.random.default_rng(SEED), rates
    chance = rng.random(shape)
    if kind == "whole documents":
        together = rng.random(shape[:2])[:, :, None] < rho
        chance = np.where(together, rng.random(shape[:2])[:, :, None], chance)
    elif rho > 0:
        lost, gained = (_own_rates(rng, shape[:2], rate, rho) for rate in (lost, gained))  # type: ignore[assignment]
    return np.asarray((chance > 1 - gained).astype(np.int64) - (chance < lost))


def _own_rates(rng: np.random.Generator, shape: tuple[int, int], rate: float, rho: float) -> npt.NDArray[np.float64]:
    """Return a rate for each document, shape (runs, documents, 1), with the mean `rate`."""
    spread = 1 / rho - 1
    own = rng.beta(rate * spread, (1 - rate) * spread, shape) if rate > 0 else np.zeros(shape)
    return np.asarray(own[:, :, None])


def _p_values(flips: Flips) -> npt.NDArray[np.float64]:
    """Return the p-values for a PASS and for a FAIL of each run, shape (2, runs)."""
    lost, gained, size = (flips < 0).sum(axis=2), (flips > 0).sum(axis=2), flips.shape[2]
    kinds = np.sort(lost * (size + 1) + gained, axis=1)  # what happened in each document; their order is nothing
    _, first, which = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    sizes = np.full(flips.shape[1], float(size))
    pairs = [st.document_pairs(lost[run].astype(np.float64), gained[run].astype(np.float64), sizes) for run in first]
    margin = GATES.margin
    both = [  # of the side on which the candidate seems to be: on the other one nothing is decided
        [st.noninferiority_p(counts, margin), 1.0] if counts.difference > -margin else [1.0, st.inferiority_p(counts, margin)]
        for counts in pairs
    ]
    return np.array(both).T[:, which.reshape(len(flips))]


def judged(flips: Flips, shares: Sequence[float]) -> tuple[float, float]:
    """Return how often evaluations with looks at these shares pass and fail: what is decided at a look ends them."""
    ended = np.zeros(len(flips), bool)
    passes = fails = 0.0
    for look in planned_looks(shares, len(shares)):
        documents = math.ceil(round(look.shares[look.number - 1] * flips.shape[1], 9))
        good, bad = _p_values(flips[:, :documents])
        enough = documents * flips.shape[2] >= GATES.min_samples
        failing = (bad <= look.fail_level(GATES.alpha)) & ~ended
        passing = (good <= look.pass_level(GATES.pass_alpha)) & ~ended & ~failing & enough
        passes, fails, ended = passes + float(passing.mean()), fails + float(failing.mean()), ended | passing | failing
    return passes, fails


def worst(shape: tuple[int, int, int], rho: float, shares: Sequence[float]) -> tuple[float, float, float]:
    """Return the most wrong PASS and wrong FAIL of a candidate at the margin, and the least PASS of a harmless one."""
    wrong = [judged(drawn(shape, rates, rho, kind), shares) for rates in AT_MARGIN for kind in KINDS]
    power = min(judged(drawn(shape, HARMLESS, rho, kind), shares)[0] for kind in KINDS)
    return max(passes for passes, _ in wrong), max(fails for _, fails in wrong), power


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="evaluations that are drawn for each figure")
    parser.add_argument("--rounds", default="0.1,0.25,0.5,0.75,1", help="cumulative shares of the planned samples")
    arguments = parser.parse_args(command_line)
    rounds = [float(share) for share in arguments.rounds.split(",")]
    plans = {"one look": [1.0], f"{len(rounds)} looks": rounds}
    columns = {f"{d} x {s}, {name}": (d, s, plan) for d, s in SIZES for name, plan in plans.items()}
    print("At the margin the most wrong PASS / the most wrong FAIL / of a harmless candidate the least PASS, in %\n")
    print(f"| rho | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for rho in CORRELATIONS:
        figures = [worst((arguments.runs, d, s), rho, plan) for d, s, plan in columns.values()]
        cells = [f"{100 * good:.1f} / {100 * bad:.1f} / {100 * power:.1f}" for good, bad, power in figures]
        print(f"| {rho:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
