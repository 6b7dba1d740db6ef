"""Error rates of the gates at their limits, and their power: how often they decide on sound and on broken caches.

    python -m benchmarks.recovery                     # two hours: 3,000 questions to SmolLM2, a file that this reads
    python -m benchmarks.gates                        # a minute: the figures of docs/statistics.md, results/error_rates.json

**Recovery.** Candidates at the limit are made from measured candidates in four ways. `proportional`: all probabilities shrink
by the same factor. `scaled`: the losses of a worse cache, made smaller. `questions`: the rows of a broken cache for some
questions. `pages`: the rows of a broken cache for all questions of some pages. Pages are drawn with replacement. With few
pages, no test can exclude `pages`: if one page in eight is broken, 13 % of draws of 15 pages contain no broken page.

**Mean KL.** A measured shape (`benchmarks.gate_shapes`) is scaled until its mean is the limit. To count wrong PASSes, this mean
is over documents that are cut at OUTLIER times the limit. To count wrong FAILs, documents are not cut.

**Greedy answers.** Documents of four answers, which flip with correlation rho: with probability rho all answers of a document
flip together, otherwise independently.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gate_shapes
from benchmarks.recovery import Answers, load
from stages.verdict.bets import OUTLIER, Array, Decisions, Mean
from stages.verdict.gates.answers import BET_SHARE, STUDENT_SHARE, WORST
from stages.verdict.verdict import ALPHA, MARGIN, RULES, Thresholds

FILE = Path(__file__).resolve().parent / "results" / "error_rates.json"
GATES = Thresholds()
RUNS, SEED = 500, 20_261_125
MIXTURES = 40
"""Number of versions of every candidate at the limit. They differ in which questions are broken, which changes the rates."""
LOOKS = ((15,), (36,), (144,), (15, 36, 72, 108, 144))
"""Sequences of looks, in pages. The last sequence is from conf/workloads/chat.yaml."""
SOUND = ("int8", "fp8")
SOUND_KL = ("fp8", "int8", "fp8k_int4v")
RHO = (0.0, 0.2, 0.5)
LOST = ((0.05, 0.0), (0.1, 0.05), (0.2, 0.0))
"""(lost, gained) shares of greedy answers: two candidates at the margin, then a broken candidate."""
Shapes = Iterator[tuple[str, Array, Array]]


def losses(base: Array, kept: Array, limit: float) -> Mean:
    """Return the losses (runs, pages) in units of the allowed loss (`stages.verdict.gates.answers`)."""
    allowed = (1 - limit) * base.mean(axis=1, keepdims=True)
    return Mean(1 - (kept - limit * base) / allowed, 1.0, best=-OUTLIER, worst=WORST, uncapped=True)


def passing(base: Array, kept: Array, limit: float, looks: Sequence[int]) -> Decisions:
    """Return, for every run, whether the gate on recovery passes at any look."""
    level, passed = GATES.pass_alpha, np.zeros(len(base), bool)
    for pages in looks:
        t_level = STUDENT_SHARE * level if pages == looks[-1] else 0.0
        passed |= losses(base[:, :pages], kept[:, :pages], limit).passes(BET_SHARE * level, t_level)
    return passed


def failing(base: Array, kept: Array, limit: float, looks: Sequence[int], figures: int) -> Decisions:
    """Return, for every run, whether the gate on recovery fails at any look. `figures`: number of figures that share ALPHA."""
    level = ALPHA / 2 / figures
    means = [losses(base[:, :pages], kept[:, :pages], limit) for pages in looks]
    return np.asarray(np.logical_or.reduce([mean.fails(level) for mean in means]))


def _mixed(base: Array, kept: Array, broken: Array, limit: float, rng: np.random.Generator, *, pages: bool) -> Array:
    """Return `kept` (pages, questions) with random questions or pages from `broken`, so that recovery is at the limit."""
    have, lose = kept.sum() / base.sum(), (kept.sum() - broken.sum()) / base.sum()
    chosen = rng.random((len(base), 1) if pages else base.shape) < (have - limit) / lose
    mixed = np.where(chosen, broken, kept)
    return np.asarray(mixed * (limit * base.sum() / mixed.sum()))


def at_limit(answers: Answers, limit: float, columns: Sequence[int], rng: np.random.Generator) -> Shapes:
    """Yield candidates with recovery at the limit: (name, baseline's probabilities, candidate's probabilities) by question."""
    worst = min(answers.candidates, key=lambda policy: answers.candidates[policy].mean())
    broken = answers.candidates[worst][:, columns]
    for policy, rows in answers.candidates.items():
        kept, base = rows[:, columns], answers.baseline[: len(rows), columns]
        recovery = kept.sum() / base.sum()
        yield f"{policy}, proportional", base, kept * (limit / recovery)
        if recovery < limit:
            yield f"{policy}, scaled", base, base - (base - kept) * (1 - limit) / (1 - recovery)
        else:
            yield f"{policy}, questions", base, _mixed(base, kept, broken, limit, rng, pages=False)
            yield f"{policy}, pages", base, _mixed(base, kept, broken, limit, rng, pages=True)


def draw_pages(base: Array, kept: Array, pages: int, rng: np.random.Generator, runs: int = RUNS) -> tuple[Array, Array]:
    """Draw pages with replacement; return baseline and candidate, (runs, pages)."""
    chosen = rng.integers(len(base), size=(runs, pages))
    return base.mean(axis=1)[chosen], kept.mean(axis=1)[chosen]


def recovery(answers: Answers, columns: Sequence[int], limit: float, looks: Sequence[int], figures: int) -> dict[str, float]:
    """Return error rates and power of the gate on recovery, in percent."""
    passed: dict[str, list[float]] = {}
    failed: dict[str, list[float]] = {}
    for rng in np.random.default_rng(SEED).spawn(MIXTURES):
        for name, base, kept in at_limit(answers, limit, columns, rng):
            runs = draw_pages(base, kept, looks[-1], rng)
            passed.setdefault(name, []).append(float(passing(*runs, limit, looks).mean()))
            failed.setdefault(name, []).append(float(failing(*runs, limit, looks, figures).mean()))
    pages = [name for name in passed if name.endswith("pages")]
    rates = {
        "wrong PASS": max(float(np.mean(shares)) for name, shares in passed.items() if name not in pages),
        "wrong PASS, broken pages": max(float(np.mean(passed[name])) for name in pages),
        "wrong FAIL": max(float(np.mean(shares)) for shares in failed.values()),
    }
    for policy, rows in answers.candidates.items():
        runs = draw_pages(
            answers.baseline[:, columns], rows[:, columns], looks[-1], np.random.default_rng(SEED), MIXTURES * RUNS
        )
        decided = passing(*runs, limit, looks) if policy in SOUND else failing(*runs, limit, looks, figures)
        rates[f"{policy} {'PASS' if policy in SOUND else 'FAIL'}"] = float(decided.mean())
    return {name: round(100 * rate, 1) for name, rate in rates.items()}


def scaled(values: Array, limit: float) -> Array | None:
    """Scale `values` until their cut mean is `limit`; return None if the positive values cannot reach the limit."""
    cut = OUTLIER * limit
    if float((values > 0).mean()) * cut <= limit:
        return None
    low, high = -40.0, 80.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(math.exp(middle) * values, cut).mean() < limit else (low, middle)
    return np.asarray(math.exp(low) * values)


def mean_kl(documents: int) -> dict[str, float]:
    """Return error rates and power of the gate on mean KL at one look, in percent."""
    rng, limit, wrong, wrong_fail, power = np.random.default_rng(SEED), GATES.max_mean_kl, 0.0, 0.0, 1.0
    for shape in gate_shapes.load():
        kl = shape.values["mean_kl"]
        at = scaled(kl, limit)
        if at is not None:
            mean = Mean(rng.choice(at, size=(2 * RUNS, documents)), limit)
            wrong = max(wrong, float(mean.passes(GATES.pass_alpha).mean()))
        mean = Mean(rng.choice(kl * (limit / kl.mean()), size=(2 * RUNS, documents)), limit)
        wrong_fail = max(wrong_fail, float(mean.fails(ALPHA).mean()))
        if shape.policy in SOUND_KL:
            mean = Mean(rng.choice(kl, size=(2 * RUNS, documents)), limit)
            power = min(power, float(mean.passes(GATES.pass_alpha).mean()))
    rates = {"wrong PASS": wrong, "wrong FAIL, alone": wrong_fail, "sound PASS, least": power}
    return {name: round(100 * rate, 1) for name, rate in rates.items()}


def greedy(documents: int, rates: tuple[float, float], rho: float, figures: int) -> float:
    """Return how often the gate on greedy answers fails at any of ten looks, in percent. `figures` share ALPHA."""
    rng, shape = np.random.default_rng(SEED), (4 * RUNS, documents, 4)
    together = rng.random((*shape[:2], 1)) < rho
    chance = np.where(together, rng.random((*shape[:2], 1)), rng.random(shape))
    lost = (chance < rates[0]).astype(float) - (chance > 1 - rates[1])
    values, level = lost.mean(axis=2), ALPHA / 2 / figures
    looks = [math.ceil(documents * tenth / 10) for tenth in range(1, 11)]
    failed = [Mean(values[:, :count], MARGIN, best=-OUTLIER * MARGIN).fails(level) for count in looks]
    return round(100 * float(np.logical_or.reduce(failed).mean()), 1)


def measure() -> dict[str, Any]:
    """Return all figures."""
    answers = load()
    places = {"all": (list(range(len(answers.kinds))), GATES.min_recovery)}
    places |= {kind: ([number], GATES.min_workload_recovery) for number, kind in enumerate(answers.kinds)}
    return {
        "recovery": {
            place: {"+".join(map(str, looks)): recovery(answers, *how, looks, len(places)) for looks in LOOKS}
            for place, how in places.items()
        },
        "mean_kl": {str(documents): mean_kl(documents) for documents in (24, 144, 576)},
        "greedy FAIL": {
            f"{100 * lost:g} % lost, {100 * gained:g} % gained, rho {rho:g}": {
                str(documents): greedy(documents, (lost, gained), rho, 1 if (lost, gained) in LOST[:2] else 30)
                for documents in (15, 40, 160)
            }
            for lost, gained in LOST
            for rho in RHO
        },
    }


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args(command_line)
    text = json.dumps({"rules": RULES, "runs": RUNS, "mixtures": MIXTURES} | measure(), indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
