"""The stress probe: an engine beside its twin on random tokens, where samples rarely lead.

Scenes (`scenes.py`) take both to the longest context and the largest batch, over every page offset, through turns, forks, long
decoding, free answers, and a crowd. Lengths and order are the same in each run, the tokens are not: what deviates at one
place with one run's tokens may be a number between two codes that rounded to the other one, what deviates at the same place
with any tokens is the engine.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.records import Progress
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.coverage import Probe
from stages.evaluate.decoding.system import allocation, process_memory
from stages.evaluate.twins.scenes import SCENES
from stages.evaluate.twins.stage import Row, Stage
from stages.evaluate.twins.twin import Twin

RUNS = 4
"""Runs that a place must deviate in before it fails. Flips hit up to a tenth of the places of one run."""


LEAST_KL = 1e-7
"""How far the median of a place may always be from the twin, in nats of KL(twin || engine): float32 shows about 1e-8."""
SINGLE_KL = 0.02
"""How far any one row may always be."""
FACTOR = 30.0
"""How many times as far as a rounding takes the twin itself, where that is more: usually, or at the place itself where the
rounding is a measured one of 16 bits. In a cache of 4 bits it is most of what short prompts of random tokens show."""


def probe(
    engine: Engine,
    twin: Twin,
    config: ProbeConfig,
    batch_size: int,
    claimed: int,
    progress: Progress,
) -> Probe:
    """Run an engine beside its twin on random tokens.

    Args:
        engine: The engine. No sequence is left in it.
        twin: Its twin.
        config: How far the probe goes.
        batch_size: Sequences in a decode step of the evaluation; the probe's largest batch is at least that.
        claimed: Tokens of the longest sample, which several rows of the largest batch have.
        progress: Called with how many of its scenes have ended.
    """
    max_tokens = min(limit for limit in (config.max_tokens, engine.max_tokens, twin.model_tokens) if limit is not None)
    largest = max(batch_size, config.max_batch)
    largest = min(largest, engine.max_batch or largest, engine.max_sequences or largest)
    failures: dict[str, str] = {}
    first: Stage | None = None
    runs, suspects, limits = 0, set[str](), (LEAST_KL, SINGLE_KL)
    held = process_memory(engine, max_tokens)
    while runs < RUNS and (first is None or failures):
        stage = Stage(engine, twin, config, max_tokens, largest, claimed, seed=runs)
        for ended in _played(stage, None if first is None else suspects):
            progress(f"stress probe{' again' if runs else ''} [scenes]", ended, len(SCENES))
        limits = _limits(stage.rows, twin.compute_dtype) if first is None else limits
        found = _deviating(stage, limits)
        failures = found if first is None else {place: text for place, text in failures.items() if place in found}
        suspects = _scenes_of(stage, failures, limits)
        first = first or stage
        runs += 1
        if stage.failures:  # what needs no other run
            break
    assert first is not None
    said = sorted(first.failures, key=lambda text: not text.startswith("isolation"))
    said += failures.values() if runs == RUNS or first.failures else ()
    if engine.can(Engine.forget_prefixes):
        engine.forget_prefixes()
    left = engine.memory()
    if left.live_tokens or left.held_pages:
        what = f"{left.live_tokens} tokens and {left.held_pages} pages"
        said.append(f"{what} stayed in the cache after every sequence was released")
    rows = first.rows
    decoded = [row for row in rows if row.shown.decoded]
    return Probe(
        tokens=max((row.shown.length for row in rows), default=0),
        decoded=max((row.shown.decoded for row in rows), default=0),
        batch=max((row.shown.batch for row in decoded), default=0),
        page_offsets=len({(row.shown.length - 1) % PAGE_TOKENS for row in decoded}),
        forks=first.forks,
        requests=first.started,
        rows=len(rows),
        failures=said,
        allocation=(first.allocation or allocation(engine)).model_copy(update={"process": held}),
        together=first.together,
        prompts=len(rows) - len(decoded),
        turns=first.turns,
        prefixes=first.reused,
    )


def _played(stage: Stage, only: Collection[str] | None) -> Iterator[int]:
    """Play scenes that the engine is able to, all or some, and yield how many have ended, before the first and after each."""
    yield 0
    for ended, scene in enumerate(SCENES, start=1):
        if (only is None or scene.name in only) and all(stage.engine.can(need) for need in scene.needs):
            try:
                scene.play(stage)
            except UserError as error:
                stage.failures.append(f"{scene.name}: the engine refused it: {error}")
            stage.compare(scene.name)
        yield ended


def _limits(rows: Sequence[Row], compute_dtype: str | None) -> tuple[float, float]:
    """Return how far the median of a place may be from the twin, and any one row.

    Where an engine's arithmetic differs by design, no rounding says how far: places are compared with the engine's usual ones.
    """
    values = [row.rounding if compute_dtype is not None else row.kl for row in rows]
    rounding = [value for value in values if value is not None and np.isfinite(value)] or [0.0]
    typical, worst = float(np.median(rounding)), max(rounding)
    return max(LEAST_KL, FACTOR * typical), max(SINGLE_KL, FACTOR * worst)


def _deviating(stage: Stage, limits: tuple[float, float]) -> dict[str, str]:
    """Return the places that deviate -> what is said of them, the worst first."""
    rows, (limit, single) = stage.rows, limits
    by_place: dict[str, list[Row]] = {}
    for row in rows:
        for place in row.places:
            by_place.setdefault(place, []).append(row)
    medians = {place: float(np.median([row.kl for row in members])) for place, members in by_place.items()}
    found: dict[str, str] = {}
    for place in sorted(medians, key=lambda place: -medians[place]):
        members = by_place[place]
        own = [row.rounding for row in members if row.rounding is not None and stage.twin.measures]
        allowed = max(limit, FACTOR * float(np.median(own))) if own else limit
        if not medians[place] <= allowed:
            worst = max(members, key=lambda row: row.kl)
            found[place] = (
                f"{place}: KL {medians[place]:.1e} from the oracle on {len(members)} tokens ({allowed:.1e} allowed), logits "
                f"off by up to {worst.difference:.2g} at position {worst.shown.length - 1}"
            )
    largest = max(rows, key=lambda row: row.kl, default=None)
    if largest is not None and not largest.kl <= single:
        shown = largest.shown
        found["single"] = (
            f"{largest.places[0]}: KL {largest.kl:.1e} from the oracle at position {shown.length - 1} (page offset "
            f"{(shown.length - 1) % PAGE_TOKENS}), row {shown.row} of a batch of {shown.batch} ({single:.1e} allowed)"
        )
    return found


def _scenes_of(stage: Stage, failures: Collection[str], limits: tuple[float, float]) -> set[str]:
    """Return the scenes in which rows of places that deviate do."""
    limit, single = limits
    return {
        row.scene
        for row in stage.rows
        if (not row.kl <= limit and any(place in failures for place in row.places))
        or ("single" in failures and not row.kl <= single)
    }
