"""How often the gates on answers pass or fail a candidate whose true rates are known, and after how many samples.

    python -m benchmarks.gate_characteristics                 # the tables of docs/trust.md, about a minute
    python -m benchmarks.gate_characteristics --samples 200

Nothing is drawn: the probabilities of all counts of lost and gained answers are carried from look to look, and the tests and
levels of `pipeline.verdict` decide each count. `tests/long/test_gates_simulation.py` draws samples and asks `decide` itself.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from scipy.signal import fftconvolve
from scipy.stats import multinomial

from pipeline.statistics import paired as st
from pipeline.statistics.bounds import Array
from pipeline.statistics.looks import Spending, nominal_levels, obrien_fleming_spending, square_root_spending
from pipeline.statistics.paired import Pairs
from pipeline.verdict.gates import Gates

GATES = Gates()
WORKLOADS = 4
NEGLIGIBLE = 1e-12
"""Counts that are less probable are not followed."""


@dataclass(frozen=True)
class Rates:
    """What a candidate does to a workload: the share of the answers that it loses, and that it gains."""

    lost: float
    gained: float


@dataclass(frozen=True)
class Rule:
    """How the error is spent. A plan of one look takes no spending function into account."""

    shares: tuple[float, ...]
    for_pass: Spending = obrien_fleming_spending
    for_fail: Spending = square_root_spending


@dataclass(frozen=True)
class Outcome:
    """Of an evaluation of several workloads."""

    passes: float
    fails: float
    mean_share: float
    """Mean share of the planned samples that was run."""
    first: float
    """Probability that it ends after the first round."""


SHARP = Rates(0.05, 0.0)
AT_MARGIN = Rates(0.055, 0.005)
HARMLESS = Rates(0.005, 0.005)
CASES: dict[str, Sequence[Rates]] = {
    "no flips": [Rates(0.0, 0.0)] * WORKLOADS,
    "0.5 % lost, 0.5 % gained": [HARMLESS] * WORKLOADS,
    "1 % lost, 1 % gained": [Rates(0.01, 0.01)] * WORKLOADS,
    "1.5 % lost, 1.5 % gained": [Rates(0.015, 0.015)] * WORKLOADS,
    "one at the margin (5 % lost), the others harmless": [SHARP, *[HARMLESS] * (WORKLOADS - 1)],
    "one at the margin (5.5 % lost, 0.5 % gained), the others harmless": [AT_MARGIN, *[HARMLESS] * (WORKLOADS - 1)],
    "all at the margin (5.5 % lost, 0.5 % gained)": [AT_MARGIN] * WORKLOADS,
    "one loses 15 %, the others harmless": [Rates(0.15, 0.0), *[HARMLESS] * (WORKLOADS - 1)],
    "one loses 60 %, the others harmless": [Rates(0.6, 0.0), *[HARMLESS] * (WORKLOADS - 1)],
    "all lose 60 %": [Rates(0.6, 0.0)] * WORKLOADS,
}


@cache
def p_value(pairs: Pairs, for_pass: bool) -> float:
    return (st.noninferiority_p if for_pass else st.inferiority_p)(pairs, GATES.margin)


@cache
def gains(samples: int, rates: Rates) -> Array:
    """Return the probability of each count of (lost, gained) answers among `samples`, shape (samples + 1, samples + 1)."""
    lost, gained = np.meshgrid(np.arange(samples + 1), np.arange(samples + 1), indexing="ij")
    counts = np.stack([lost, gained, samples - lost - gained], axis=-1)
    chances = multinomial.pmf(counts, samples, [rates.lost, rates.gained, 1 - rates.lost - rates.gained])
    return np.asarray(chances)


def crossed(mass: Array, samples: int, level: float, for_pass: bool) -> Array:
    """Return which counts of (lost, gained) that are probable enough have crossed a boundary, shape of `mass`."""
    inside = np.zeros(mass.shape, dtype=bool)
    for lost, gained in np.argwhere(mass > NEGLIGIBLE):
        inside[lost, gained] = p_value(Pairs(samples, int(lost), int(gained)), for_pass) <= level
    return inside


@dataclass(frozen=True)
class Progress:
    """Of one workload at one look: probabilities that it has not failed so far and..."""

    passed: float
    """... has passed at this look or before."""
    passed_before: float
    """... has passed before this look."""
    open: float
    """... whatever else."""


@cache
def progress(samples: int, rates: Rates, rule: Rule, workloads: int) -> list[Progress]:
    """Carry the counts of one workload through all looks."""
    pass_levels = nominal_levels(rule.shares, GATES.pass_alpha, rule.for_pass)
    fail_levels = nominal_levels(rule.shares, GATES.alpha / workloads, rule.for_fail)  # Holm's first step decides "any"
    undecided, passed, before = np.ones((1, 1)), np.zeros((1, 1)), 0
    result = []
    for share, pass_level, fail_level in zip(rule.shares, pass_levels, fail_levels, strict=True):
        now = math.ceil(round(share * samples, 9))
        undecided, passed = (fftconvolve(mass, gains(now - before, rates)) for mass in (undecided, passed))
        bad = crossed(undecided + passed, now, fail_level, for_pass=False)
        undecided, passed, before = np.where(bad, 0.0, undecided), np.where(bad, 0.0, passed), now
        passed_before = float(passed.sum())
        good = crossed(undecided, now, pass_level if now >= GATES.min_samples else 0.0, for_pass=True)
        passed, undecided = passed + np.where(good, undecided, 0.0), np.where(good, 0.0, undecided)
        result.append(Progress(float(passed.sum()), passed_before, float((passed + undecided).sum())))
    return result


def sequential(case: Sequence[Rates], samples: int, rule: Rule) -> Outcome:
    """Return the outcome by the rules of `pipeline.verdict.gates`; workloads are independent of each other."""
    looks = zip(*(progress(samples, rates, rule, len(case)) for rates in case), strict=True)
    running, passes, fails, mean_share, first = 1.0, 0.0, 0.0, 0.0, 0.0
    for number, (share, states) in enumerate(zip(rule.shares, looks, strict=True), 1):
        all_passed_before = math.prod(state.passed_before for state in states)
        passing = math.prod(state.passed for state in states) - all_passed_before
        failing = max(0.0, running - (math.prod(state.open for state in states) - all_passed_before))
        passes, fails = passes + passing, fails + failing
        ends = running if number == len(rule.shares) else passing + failing
        first = ends if number == 1 else first
        mean_share += share * ends
        running -= passing + failing
    return Outcome(passes, fails, mean_share, first)


def holm_for_pass(case: Sequence[Rates], samples: int) -> Outcome:
    """Return the outcome of one look with Holm's procedure for PASS too, as the rules were before there were rounds."""
    count = len(case)
    steps = [GATES.pass_alpha / (count - rank) for rank in range(count)]
    shares = []
    for rates in case:  # of each workload: the probability of a p-value between one step and the next
        mass = gains(samples, rates)
        below = [float(mass[crossed(mass, samples, step, for_pass=True)].sum()) for step in steps]
        shares.append(np.diff([0.0, *below, 1.0]))
    passes = 0.0
    for ranks in itertools.product(range(count + 1), repeat=count):
        if all(rank <= position for position, rank in enumerate(sorted(ranks))):
            passes += math.prod(float(share[rank]) for share, rank in zip(shares, ranks, strict=True))
    return Outcome(passes, sequential(case, samples, Rule((1.0,))).fails, 1.0, 1.0)


Judge = Callable[[Sequence[Rates]], Outcome]


def table(title: str, columns: dict[str, Judge], cases: Sequence[str]) -> None:
    """Print a Markdown table: for each case and rule PASS, FAIL and the mean share of the samples, in percent."""
    print(f"\n{title}\n\n| candidate | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in cases:
        outcomes = [outcome(CASES[name]) for outcome in columns.values()]
        cells = [f"{100 * o.passes:.1f} / {100 * o.fails:.1f} / {100 * o.mean_share:.0f}" for o in outcomes]
        print(f"| {name} | {' | '.join(cells)} |")


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=160, help="planned samples of a workload")
    parser.add_argument("--rounds", default="0.1,0.25,0.5,0.75,1", help="cumulative shares of the planned samples")
    arguments = parser.parse_args(command_line)
    samples, shares = arguments.samples, tuple(float(share) for share in arguments.rounds.split(","))
    one, planned = Rule((1.0,)), Rule(shares)
    what = f"{WORKLOADS} workloads, {samples} samples of each, margin {GATES.margin:g}: PASS / FAIL / mean samples, in %"
    rules: dict[str, Judge] = {
        "one look, Holm for PASS": lambda case: holm_for_pass(case, samples),
        "one look": lambda case: sequential(case, samples, one),
        f"{len(shares)} looks": lambda case: sequential(case, samples, planned),
    }
    table(what, rules, list(CASES))
    others: dict[str, Spending] = {
        "O'Brien-Fleming type": obrien_fleming_spending,
        "alpha t^3": lambda share, alpha: alpha * share**3,
        "alpha t": lambda share, alpha: alpha * share,
        "alpha sqrt(t)": square_root_spending,
        "Pocock type": lambda share, alpha: alpha * math.log(1 + (math.e - 1) * share),
    }

    def judges(rules: dict[str, Rule]) -> dict[str, Judge]:
        return {name: partial(sequential, samples=samples, rule=rule) for name, rule in rules.items()}

    for_pass = judges({name: replace(planned, for_pass=function) for name, function in others.items()})
    table("What PASS spends", for_pass, ["0.5 % lost, 0.5 % gained", "one at the margin (5 % lost), the others harmless"])
    for_fail = judges({name: replace(planned, for_fail=function) for name, function in others.items()})
    table("What FAIL spends", for_fail, [name for name in CASES if "lose" in name])
    broken = sequential(CASES["all lose 60 %"], samples, planned)
    print(f"\nAll lose 60 %: it ends after the first round in {100 * broken.first:.1f} % of the evaluations.")


if __name__ == "__main__":
    main()
