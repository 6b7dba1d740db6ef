"""Error rates of the recovery gate, simulated by sampling from 3,000 questions that SmolLM2 answered with four caches.

`benchmarks.gates` constructs candidates exactly at the limit from the measured candidates. Candidates with a few broken pages
are excluded, because no bound can rule out faults that occur in only a few pages.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.verdicts.reports import GATES, at_most, lines, report, row

from benchmarks.gates import at_limit, draw_pages, failing, greedy, passing
from benchmarks.recovery import load
from stages.verdict.bets import Array
from stages.verdict.verdict import ALPHA

ANSWERS, RUNS = load(), 2000
LOOKS = (15, 36, 72, 108, 144)
"""Numbers of pages at the looks of `conf/workloads/chat.yaml`."""
KINDS = list(range(len(ANSWERS.kinds)))
PLACES = [(KINDS, GATES.min_recovery), *(([kind], GATES.min_workload_recovery) for kind in KINDS)]
AT_ONE_LOOK = [(KINDS, GATES.min_recovery, (pages,)) for pages in LOOKS[1:-1]]


def shapes(columns: list[int] = KINDS, limit: float = GATES.min_recovery) -> Iterator[tuple[str, Array, Array]]:
    candidates = at_limit(ANSWERS, limit, columns, np.random.default_rng(1))
    return ((name, base, kept) for name, base, kept in candidates if not name.endswith("pages"))


@pytest.mark.parametrize(("columns", "limit", "looks"), [*((*place, LOOKS) for place in PLACES), *AT_ONE_LOOK])
def test_a_candidate_at_the_limit_rarely_passes_or_fails(columns: list[int], limit: float, looks: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    for name, base, kept in shapes(columns, limit):
        runs = draw_pages(base, kept, looks[-1], rng, RUNS)
        assert passing(*runs, limit, looks).mean() <= at_most(0.05, RUNS), name
        assert failing(*runs, limit, looks, len(PLACES)).mean() <= at_most(ALPHA / 2, RUNS), name


def test_the_gate_decides_like_the_simulation() -> None:
    rng, kept = np.random.default_rng(5), ANSWERS.candidates["fp8"]
    decided = set()
    for _ in range(50):
        pages = int(rng.choice(LOOKS))
        chosen = rng.integers(len(kept), size=pages)
        rows = [
            row(kind, i, document=f"{i}", baseline_probability=base, candidate_probability=candidate)
            for i, page in enumerate(chosen)
            for kind, base, candidate in zip(ANSWERS.kinds, ANSWERS.baseline[page], kept[page], strict=True)
        ]
        before, after = (part[chosen].mean(axis=1)[None] for part in (ANSWERS.baseline, kept))
        passes = bool(passing(before, after, GATES.min_recovery, [pages])[0])
        (check,) = (check for check in lines("min_recovery", report(rows), rows) if check.where == "all")
        assert (check.status == "PASS") is passes
        decided.add(passes)
    assert decided == {True, False}


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_greedy_answers_at_the_margin_rarely_fail(rho: float) -> None:
    for lost, gained in ((0.05, 0.0), (0.1, 0.05)):
        assert greedy(40, (lost, gained), rho, 1) <= 100 * at_most(0.05, RUNS)
    assert greedy(40, (0.2, 0.0), rho, 30) >= 80
