"""How often the gate on recovery passes a candidate exactly at its limit, and a sound one, on rows that were measured.

    python -m benchmarks.recovery                     # two hours: 3,000 questions to SmolLM2, the file that this reads
    python -m benchmarks.gate_recovery                # the figures of docs/verdict.md on recovery

A candidate at its limit is made from the measured ones: by a loss in proportion to the probability (`proportional`), by the
losses of a cache that loses more, made smaller (`scaled`), or by a broken cache's rows for some questions (`questions`) or for
some whole pages (`pages`). Pages are drawn with replacement. The last is what no bound can exclude with few pages: where one
page in eight is broken, 15 pages hold none in 13 %.
"""

import argparse
import math
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.recovery import Answers, load
from pipeline.statistics.bets import MANY, OUTLIER
from pipeline.statistics.bounds import SHARES_OF_WHOLE, Array, log_wealth, skewed_upper_bound
from pipeline.statistics.looks import planned_looks
from pipeline.verdict.gates import Gates
from pipeline.verdict.gates.recovery import BET, STUDENT

GATES = Gates()
RUNS, SEED = 2000, 20_261_125
MIXTURES = 10
"""How often each candidate at the limit is made: which questions are broken changes what passes."""
SOUND = ("int8", "fp8")
Shapes = Iterator[tuple[str, Array, Array]]


def shown(base: Array, kept: Array, limit: float, t_level: float) -> Array:
    """Return in which runs (runs, pages) the gate shows that recovery is above the limit: a page seen counts whole."""
    mean = base.mean(axis=1, keepdims=True)
    loss, most = base - kept - (1 - limit) * (base - mean), (1 - limit) * mean
    worst = np.maximum(OUTLIER * most, loss.max(axis=1, keepdims=True))
    gains = (most - np.clip(loss, -OUTLIER * most, worst)) / (worst - most)
    passes = log_wealth(gains, SHARES_OF_WHOLE) >= -math.log(BET * GATES.pass_alpha)
    if base.shape[1] >= MANY:
        passes |= skewed_upper_bound(loss, t_level) <= most[:, 0]
    return np.asarray(passes)


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


def passing(base: Array, kept: Array, limit: float, looks: Sequence[int], rng: np.random.Generator) -> float:
    """Return the share of runs that pass at any look, each after so many pages."""
    drawn = rng.integers(len(base), size=(RUNS, looks[-1]))
    before, after = base.mean(axis=1)[drawn], kept.mean(axis=1)[drawn]
    planned = planned_looks([pages / looks[-1] for pages in looks], len(looks))
    levels = [look.pass_level(STUDENT * GATES.pass_alpha) for look in planned]
    passed = [shown(before[:, :pages], after[:, :pages], limit, level) for pages, level in zip(looks, levels, strict=True)]
    return float(np.logical_or.reduce(passed).mean())


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="15,36,144,15+36+72+108+144", help="pages of a look, and of several looks")
    counts = [[int(count) for count in looks.split("+")] for looks in parser.parse_args(command_line).pages.split(",")]
    answers = load()
    places = {"all": (list(range(len(answers.kinds))), GATES.min_recovery)}
    places |= {kind: ([number], GATES.min_workload_recovery) for number, kind in enumerate(answers.kinds)}
    print(f"wrong PASS of the worst shape (its name), broken pages / PASS of {', '.join(SOUND)}, in %\n")
    names = ["+".join(map(str, looks)) for looks in counts]
    print(f"| limit, pages | {' | '.join(names)} |\n|---|{'---|' * len(counts)}")
    for place, (columns, limit) in places.items():
        cells = []
        for looks in counts:
            passed: dict[str, list[float]] = {}
            for rng in np.random.default_rng(SEED).spawn(MIXTURES):
                for shape, base, kept in at_limit(answers, limit, columns, rng):
                    passed.setdefault(shape, []).append(passing(base, kept, limit, looks, rng))
            wrong = {shape: float(np.mean(shares)) for shape, shares in passed.items()}
            inherent = [wrong.pop(shape) for shape in list(wrong) if shape.endswith("pages")]
            worst = max(wrong, key=lambda shape: wrong[shape])
            base = answers.baseline[:, columns]
            sound = [
                passing(base, answers.candidates[policy][:, columns], limit, looks, rng)
                for policy in SOUND
                if policy in answers.candidates
            ]
            text = f"{100 * wrong[worst]:.1f} ({worst}), broken pages {100 * max(inherent, default=0.0):.1f}"
            cells.append(f"{text} / {' '.join(f'{100 * share:.1f}' for share in sound)}")
        print(f"| {place}, {limit:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
