"""How often bounds of recovery pass a candidate exactly at its limit, and a sound one, on rows that were measured.

    python -m benchmarks.recovery                     # two hours: 3,000 questions to SmolLM2, the file that this reads
    python -m benchmarks.gate_recovery                # the figures of docs/verdict.md on recovery, about three minutes

A candidate at its limit is made from the measured ones: by a loss in proportion to the probability (`proportional`), by the
losses of a cache that loses more, made smaller (`scaled`), or by a broken cache's rows for some questions (`questions`) or for
some whole pages (`pages`). Pages are drawn with replacement. The last is what no bound can exclude with few pages: where one
page in eight is broken, 15 pages hold none in 13 %.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

from benchmarks.recovery import Answers, load
from pipeline.statistics.bets import OUTLIER
from pipeline.statistics.bounds import SHARES_FOR_PASS, Array
from pipeline.verdict.gates import Gates

GATES = Gates()
RUNS, REPLICATES, SEED = 2000, 400, 20_261_125
SOUND = ("int8", "fp8")
Shapes = Iterator[tuple[str, Array, Array]]
Bound = Callable[[Array, Array, float, float], Array]
"""(baseline, candidate of shape (runs, pages), limit, alpha) -> whether each run shows that recovery is above the limit."""


def _losses(base: Array, kept: Array, limit: float) -> tuple[Array, Array]:
    """Return the loss of each page as the gate counts it, and the limit of its mean, of shape (runs, 1)."""
    mean = base.mean(axis=1, keepdims=True)
    return base - kept - (1 - limit) * (base - mean), (1 - limit) * mean


def bet(cap: float, *, whole: bool) -> Bound:
    """Return the bet with a cap of `cap` times the limit; `whole`: what was seen beyond the cap counts whole."""

    def passes(base: Array, kept: Array, limit: float, alpha: float) -> Array:
        loss, most = _losses(base, kept, limit)
        worst = np.maximum(cap * most, loss.max(axis=1, keepdims=True)) if whole else cap * most
        gains = (most - np.clip(loss, -cap * most, worst)) / (worst - most)
        logs = [np.log1p(share * gains).sum(axis=1) for share in SHARES_FOR_PASS]
        return np.asarray(np.logaddexp.reduce(logs) - math.log(len(logs)) >= -math.log(alpha))

    return passes


def uncapped_bet(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    """The bet whose worst case is that a page loses all of the largest probability."""
    loss, most = _losses(base, kept, limit)
    worst = np.maximum(base.max(axis=1, keepdims=True), loss.max(axis=1, keepdims=True))
    logs = [np.log1p(share * (most - loss) / (worst - most)).sum(axis=1) for share in SHARES_FOR_PASS]
    return np.asarray(np.logaddexp.reduce(logs) - math.log(len(logs)) >= -math.log(alpha))


def student(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    loss, most = _losses(base, kept, limit)
    count = loss.shape[1]
    error = loss.std(axis=1, ddof=1) / math.sqrt(count)
    return np.asarray(loss.mean(axis=1) - float(stdtrit(count - 1, alpha)) * error <= most[:, 0])


def student_with_control_variate(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    """Student's t of the loss less its regression on the baseline's probability (2502.10563)."""
    loss, centred = base - kept, base - base.mean(axis=1, keepdims=True)
    slope = (loss * centred).sum(axis=1, keepdims=True) / np.maximum((centred**2).sum(axis=1, keepdims=True), 1e-12)
    return student(base, base - (loss - slope * centred) - (1 - limit) * centred, limit, alpha)


def empirical_bernstein(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    """Maurer and Pontil (COLT 2009), of losses cut at OUTLIER times the limit."""
    loss, most = _losses(base, kept, limit)
    cut, count, log = np.clip(loss, -OUTLIER * most, OUTLIER * most), loss.shape[1], math.log(2 / alpha)
    width = 2 * OUTLIER * most[:, 0]
    bound = cut.mean(axis=1) + np.sqrt(2 * cut.var(axis=1, ddof=1) * log / count) + 7 * width * log / (3 * (count - 1))
    return np.asarray(bound <= most[:, 0])


def gaffke(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    """A Bayesian bootstrap with one more page at the worst value (Gaffke 2005; Learned-Miller and Thomas 2020)."""
    loss, most = _losses(base, kept, limit)
    worst = np.maximum(OUTLIER * most, loss.max(axis=1, keepdims=True))
    weights = np.random.default_rng(SEED).exponential(size=(REPLICATES, loss.shape[1] + 1))
    weights /= weights.sum(axis=1, keepdims=True)
    means = np.clip(loss, -OUTLIER * most, worst) @ weights[:, :-1].T + worst * weights[:, -1]
    return np.asarray(np.quantile(means, 1 - alpha, axis=1) <= most[:, 0])


def anytime_student(base: Array, kept: Array, limit: float, alpha: float) -> Array:
    """The sequential Gaussian test that matches the fixed one at this many pages (Koning and van Meer, 2501.03982)."""
    loss, most = _losses(base, kept, limit)
    count = loss.shape[1]
    z = (most[:, 0] - loss.mean(axis=1)) / np.maximum(loss.std(axis=1, ddof=1), 1e-12) * math.sqrt(count)
    tilt = -float(ndtri(alpha))
    return np.asarray(tilt * z - tilt * tilt / 2 >= -math.log(alpha))


BOUNDS: dict[str, Bound] = {
    "bet, pages seen count whole (the gate)": bet(OUTLIER, whole=True),
    "bet, all pages cut": bet(OUTLIER, whole=False),
    "bet, cap of 5 limits": bet(5.0, whole=True),
    "bet, worst case all that there is": uncapped_bet,
    "empirical Bernstein, cut": empirical_bernstein,
    "Gaffke": gaffke,
    "Student's t": student,
    "Student's t, control variate": student_with_control_variate,
    "anytime Gaussian": anytime_student,
}


def _mixed(base: Array, kept: Array, broken: Array, limit: float, rng: np.random.Generator, *, pages: bool) -> Array:
    """Return `kept` with as many questions, or pages, of `broken` as bring recovery to the limit; shape (pages, questions)."""
    have, lose = kept.sum() / base.sum(), (kept.sum() - broken.sum()) / base.sum()
    share = (have - limit) / lose
    chosen = rng.random((len(base), 1) if pages else base.shape) < share
    mixed = np.where(chosen, broken, kept)
    return np.asarray(mixed * (limit * base.sum() / mixed.sum()))


def at_limit(answers: Answers, limit: float, columns: Sequence[int], rng: np.random.Generator) -> Shapes:
    """Yield candidates whose recovery is the limit: name, and the probabilities of baseline and candidate by question."""
    worst = min(answers.candidates, key=lambda policy: answers.candidates[policy].mean())
    broken = answers.candidates[worst][:, columns]
    for policy, rows in answers.candidates.items():
        kept, base = rows[:, columns], answers.baseline[: len(rows), columns]
        recovery = kept.sum() / base.sum()
        yield f"{policy}, proportional", base, kept * (limit / recovery)
        if recovery < limit:
            yield f"{policy}, scaled", base, base - (base - kept) * (1 - limit) / (1 - recovery)
        else:
            few = min(len(base), len(broken))
            some = base[:few], kept[:few], broken[:few]
            yield f"{policy}, questions", base[:few], _mixed(*some, limit, rng, pages=False)
            yield f"{policy}, pages", base[:few], _mixed(*some, limit, rng, pages=True)


def passing(bound: Bound, base: Array, kept: Array, limit: float, pages: int, rng: np.random.Generator) -> float:
    """Return the share of runs of so many pages that pass."""
    drawn = rng.integers(len(base), size=(RUNS, pages))
    by_page = base.mean(axis=1), kept.mean(axis=1)
    return float(bound(by_page[0][drawn], by_page[1][drawn], limit, GATES.pass_alpha).mean())


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="15,38,150", help="pages of a look")
    counts = [int(count) for count in parser.parse_args(command_line).pages.split(",")]
    answers = load()
    places = {"all": (list(range(len(answers.kinds))), GATES.min_recovery)}
    places |= {kind: ([number], GATES.min_workload_recovery) for number, kind in enumerate(answers.kinds)}
    for place, (columns, limit) in places.items():
        print(f"\n{place}, limit {limit:g}: wrong PASS of the worst shape (its name) / PASS of {', '.join(SOUND)}, in %\n")
        print(f"| bound | {' | '.join(f'{count} pages' for count in counts)} |\n|---|{'---|' * len(counts)}")
        for name, bound in BOUNDS.items():
            cells = []
            for count in counts:
                rng = np.random.default_rng(SEED)
                wrong = {
                    shape: passing(bound, base, kept, limit, count, rng)
                    for shape, base, kept in at_limit(answers, limit, columns, rng)
                }
                inherent = [wrong.pop(shape) for shape in list(wrong) if shape.endswith("pages")]
                worst = max(wrong, key=lambda shape: wrong[shape])
                base = answers.baseline[:, columns]
                sound = [
                    passing(bound, base, answers.candidates[policy][:, columns], limit, count, rng)
                    for policy in SOUND
                    if policy in answers.candidates
                ]
                text = f"{100 * wrong[worst]:.1f} ({worst}), broken pages {100 * max(inherent, default=0.0):.1f}"
                cells.append(f"{text} / {' '.join(f'{100 * share:.1f}' for share in sound)}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
