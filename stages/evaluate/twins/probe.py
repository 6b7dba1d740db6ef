"""The stress probe: an engine beside its twin on random tokens, where samples rarely lead.

To the engine's own longest context and largest batch, over every page offset, in ragged batches, through forks, later chunks,
long free generation, and pages that are freed and used again under load (`probe_parts`). Lengths and order are the same in each
run, the tokens are not: what deviates at one place with one run's tokens may be a number between two codes that rounded to the
other one, what deviates at the same place with any tokens is the engine.
"""

import time
from collections.abc import Sequence

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.records import Progress
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Probe, ProbePart
from pipeline.verdict.record import finite
from stages.evaluate.decoding.system import allocation
from stages.evaluate.twins.probe_parts import Row, Schedule
from stages.evaluate.twins.twin import Twin

RUNS = 4
"""Runs that a place must deviate in before it fails. Flips hit up to a tenth of the places of one run."""


LEAST_KL = 1e-6
"""How far the median of a place may always be from the twin, in nats of KL(twin || engine): float32 shows about 1e-8."""
SINGLE_KL = 0.1
"""How far any one row may always be."""
FACTOR = 30.0
"""How many times as far as a rounding takes the twin itself, where that is more."""


def probe(
    engine: Engine,
    twin: Twin,
    config: ProbeConfig,
    batch_size: int,
    progress: Progress,
) -> Probe:
    """Run an engine beside its twin on random tokens.

    Args:
        engine: The engine. No sequence is left in it.
        twin: Its twin.
        config: How far the probe goes.
        batch_size: Sequences in a decode step of the evaluation; the probe's largest batch is at least that.
        progress: Called with how many of its parts have ended.
    """
    started = time.perf_counter()
    own_tokens, own_batch = engine.max_tokens, engine.max_batch
    max_tokens = min(limit for limit in (config.max_tokens, own_tokens, twin.model_tokens) if limit is not None)
    largest = max(batch_size, config.max_batch) if own_batch is None else own_batch
    sizes = sorted({min(batch_size, largest), min(largest, max(batch_size, config.max_batch))})
    failures: dict[str, str] = {}
    first: Schedule | None = None
    runs = 0
    while runs < RUNS and (first is None or failures):
        schedule = Schedule(engine, twin, config, max_tokens, sizes, seed=runs)
        for ended, parts in schedule.parts():
            progress(f"stress probe{' again' if runs else ''} [parts]", ended, parts)
        found = _deviating(schedule)
        failures = found if first is None else {place: text for place, text in failures.items() if place in found}
        first = first or schedule
        runs += 1
    assert first is not None
    left = engine.memory()
    if left.live_tokens or left.held_pages:
        what = f"{left.live_tokens} tokens and {left.held_pages} pages"
        failures["leak"] = f"{what} stayed in the cache after every sequence was released"
    rows = first.rows
    limit, single = _limits(rows, twin.compute_dtype)
    return Probe(
        tokens=max((row.length for row in rows), default=0),
        decoded=max((row.decoded for row in rows), default=0),
        batch=max((row.batch for row in rows), default=0),
        page_offsets=len({(row.length - 1) % PAGE_TOKENS for row in rows}),
        forks=first.forks,
        requests=first.started,
        engine_tokens=own_tokens,
        engine_batch=own_batch,
        runs=runs,
        limit_kl=limit,
        limit_single_kl=single,
        parts=_parts(rows),
        failures=list(failures.values()),
        allocation=first.allocation or allocation(engine),
        seconds=time.perf_counter() - started,
    )


def _limits(rows: Sequence[Row], compute_dtype: str | None) -> tuple[float, float]:
    """Return how far the median of a place may be from the twin, and any one row.

    Where an engine's arithmetic differs by design, no rounding says how far: places are compared with the engine's usual ones.
    """
    values = [row.rounding if compute_dtype is not None else row.kl for row in rows]
    rounding = [value for value in values if value is not None and np.isfinite(value)] or [0.0]
    typical, worst = float(np.median(rounding)), max(rounding)
    return max(LEAST_KL, FACTOR * typical), max(SINGLE_KL, FACTOR * worst)


def _deviating(schedule: Schedule) -> dict[str, str]:
    """Return the places that deviate -> what is said of them, the worst first."""
    rows = schedule.rows
    limit, single = _limits(rows, schedule.twin.compute_dtype)
    by_place: dict[str, list[Row]] = {}
    for row in rows:
        for place in row.places:
            by_place.setdefault(place, []).append(row)
    medians = {place: float(np.median([row.kl for row in members])) for place, members in by_place.items()}
    found = {place: place for place in schedule.failures}
    for place in sorted(medians, key=lambda place: -medians[place]):
        if not medians[place] <= limit:
            members = by_place[place]
            worst = max(members, key=lambda row: row.kl)
            found[place] = (
                f"{place}: KL {medians[place]:.1e} from the oracle on {len(members)} tokens ({limit:.1e} allowed), logits "
                f"off by up to {worst.difference:.2g} at position {worst.length - 1}"
            )
    largest = max(rows, key=lambda row: row.kl, default=None)
    if largest is not None and not largest.kl <= single:
        found["single"] = (
            f"{largest.places[0]}: KL {largest.kl:.1e} from the oracle at position {largest.length - 1} (page offset "
            f"{(largest.length - 1) % PAGE_TOKENS}), row {largest.row} of a batch of {largest.batch} ({single:.1e} allowed)"
        )
    return found


def _parts(rows: Sequence[Row]) -> list[ProbePart]:
    parts = []
    for name in dict.fromkeys(row.part for row in rows):
        kl, differences = np.array([(row.kl, row.difference) for row in rows if row.part == name]).T
        medians = {"kl_median": finite(float(np.median(kl))), "kl_max": finite(float(kl.max()))}
        parts.append(ProbePart(name=name, rows=len(kl), largest_difference=finite(float(differences.max())), **medians))
    return parts
