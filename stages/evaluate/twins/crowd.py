"""A crowd of requests that come and go in a full batch, and whether any of them reads what another one wrote.

Two of three requests are watched, the others are strangers, in a drawn order. The crowd is played twice, with the same watched
requests in the same places and strangers of the same lengths and other tokens: no watched logit may change. What changes it
comes from a page, a row or a buffer of a stranger, live or gone, however small the change is. The second time sleepers hold a
page each, so that the crowd lives on pages whose numbers take more than a byte. Where an engine does not repeat itself, the
first play is repeated as it was, and strangers may change no more than that does.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.core.engine import Engine
from stages.evaluate.decoding.system import STATM, resident_bytes
from stages.evaluate.twins.request import PASS_TOKENS
from stages.evaluate.twins.stage import Actor, Stage

SHORT = ((1, 3, 17), (2, 8, 9), (9, 15, 14), (16, 30, 10), (31, 50, 8), (51, 63, 6), (64, 70, 4))
"""Least and most tokens of the prompts of short requests, and tokens of their answers."""
LONG = ((130, 190), (370, 430), (220, 300))
"""Least and most tokens of the prompts of one request in five, whose pages from the third on are used again by others."""
LONG_STEPS = 24
"""Tokens of their answers: so many that several of them are always live."""
ASLEEP_PAGES = 256
"""Pages that are in use when a crowd has grown beside sleepers."""
ASLEEP_BYTES = 64 << 20
"""Most bytes of so many pages: where a model's take more, nobody sleeps."""
WATCHED_LOGITS = 512
"""Logits of a row that are kept: what reads another page changes them all."""
NOISE = 4.0
"""How many times as much as a repetition strangers may change."""

WEAR_STEPS = 16
"""Decode steps of a request that is asked again and again."""
LEAK_BYTES = 512 << 10
"""Least growth of the process that counts, in each of the last three quarters of these requests."""

Marks = npt.NDArray[np.float32]


def crowd(stage: Stage) -> None:
    """Requests that come and go, one in five of them long, with strangers among them whose tokens are exchanged."""
    kinds = _kinds(stage)
    first = _play(stage, kinds, 1, compared=True)
    sleepers = _asleep(stage)
    other = _play(stage, kinds, 2)
    stage.engine.release(sleepers)
    changed = _difference(first, other)
    if changed.max(initial=0.0) == 0.0:
        return
    largest = max((float(np.abs(marks).max()) for marks in first), default=0.0)
    repeated = _difference(first, _play(stage, kinds, 1))
    # Noise is in most tokens. What differs in a few is no noise, and what happens rarely need not happen in the same place.
    noise = float(repeated.max()) if np.median(repeated) > 0 else 0.0
    allowed = NOISE * max(noise, stage.engine.logit_step * largest)
    influenced = ~(changed <= allowed)
    if influenced.any():
        usual = f"{noise:.2g} when nothing does" if noise else "nothing, but for rare steps, when nothing does"
        stage.failures.append(
            f"isolation: {influenced.sum()} of {len(changed)} tokens of a crowd depend on what other requests hold: "
            f"logits change by up to {changed.max():.2g} when only the others' tokens do, by {usual}"
        )


def wear(stage: Stage) -> None:
    """Two short requests again and again: they get the logits of the first time, and the process's memory stands still."""
    count = stage.config.requests
    if stage.engine.can(Engine.forced_together) or stage.max_tokens < 4 * WEAR_STEPS:
        return
    pair = [stage.actor(f"one of {count} equal requests", length, WEAR_STEPS) for length in (37, 5)[: stage.largest]]
    first, changed, resident = list[Marks](), list[float](), list[int]()
    for number in range(count):
        again = [Actor(one.role, one.prompt, list(one.ahead), watched=number == 0) for one in pair]
        stage.prefill(*again)
        stage.decode(*again, steps=WEAR_STEPS)
        stage.leave(*again)
        marks = [mark for actor in again for mark in _marks(actor)]
        first = first or marks
        changed += _difference(first, marks).tolist()
        if STATM.exists() and 4 * (number + 1) // count > len(resident):
            resident.append(resident_bytes())
    largest = max(float(np.abs(mark).max()) for mark in first)
    allowed = max(NOISE * float(np.median(changed)), stage.engine.logit_step * largest)
    wrong = ~(np.array(changed) <= allowed)
    if wrong.any():
        where = int(wrong.argmax()) // len(first) + 1
        stage.failures.append(
            f"wear: {wrong.sum()} tokens of {count} equal requests, first of request {where}, differ from the first time by up "
            f"to {max(changed):.2g} ({allowed:.2g} allowed)"
        )
    grown = int(np.diff(resident).min(initial=1 << 62)) if len(resident) == 4 else 0  # the first quarter may allocate
    if grown >= LEAK_BYTES:
        each = 4 * grown / (count * len(pair)) / 1024
        stage.failures.append(f"wear: the process grows by {each:.1f} KiB with each of {count} equal requests")


def _asleep(stage: Stage) -> list[int]:
    """Start sequences of one page that nobody decodes, which are forks where they cost nothing but their page."""
    engine, count = stage.engine, ASLEEP_PAGES - stage.largest
    small = engine.policy.pool_bytes(engine.shape, ASLEEP_PAGES) <= ASLEEP_BYTES
    if engine.max_sequences is not None or not engine.can(Engine.fork) or not small:
        return []
    first = engine.prefill([stage.draw(1)])[0]
    return first + [engine.fork(first[0]) for _ in range(count - 1)]


def _kinds(stage: Stage) -> list[Actor]:
    """Return what is asked again and again."""
    most = stage.max_tokens
    shapes = [(stage.length(low, high), steps) for low, high, steps in SHORT if high + steps <= most]
    # Three lengths of a long request, as far as the model and the engine go.
    drawn = [stage.length(*span) for span in LONG]
    shapes += [(max(1, min(length, most - LONG_STEPS - number)), LONG_STEPS) for number, length in enumerate(drawn)]
    return [stage.actor(f"request of {length} and {steps} tokens", length, steps) for length, steps in shapes]


def _guests(stage: Stage, kinds: Sequence[Actor], strangers: int) -> Iterator[Actor]:
    """Yield the requests in the order in which they come: of the same lengths in each play. Strangers have no role."""
    order, tokens = np.random.default_rng([stage.seed, 0]), np.random.default_rng([stage.seed, strangers])
    long = len(kinds) - len(LONG)
    for is_long in order.permutation(np.arange(stage.config.requests) % 5 == 4):  # no period, as what is rare may have
        kind = kinds[int(order.integers(long, len(kinds)) if is_long else order.integers(long))]
        parts = order.integers(4) == 0
        if order.integers(3):
            yield Actor(kind.role, kind.prompt, list(kind.ahead))
            continue
        drawn: list[int] = tokens.integers(0, stage.engine.vocab_size, len(kind.prompt) + len(kind.ahead)).tolist()
        prompt = kind.prompt if parts else drawn[: len(kind.prompt)]  # a request that begins as a watched one, and parts
        yield Actor("", prompt, drawn[len(kind.prompt) :], watched=False)


def _play(stage: Stage, kinds: Sequence[Actor], strangers: int, *, compared: bool = False) -> list[Marks]:
    """Let the crowd come and go; return some logits of every watched token, in order."""
    waiting = deque(_guests(stage, kinds, strangers))
    marks: list[Marks] = []
    live: list[Actor] = []
    while waiting or live:
        arrived = [waiting.popleft() for _ in range(min(stage.largest - len(live), len(waiting)))]
        for actor in arrived:
            actor.watched &= compared
            actor.role = actor.role and f"{actor.role}, quarter {4 - 4 * len(waiting) // (stage.config.requests + 1)}"
        if stage.engine.can(Engine.forced_together):
            stage.play(arrived)
            live, leaving = [], arrived
        else:
            if arrived:
                stage.prefill(*arrived)
                live += arrived
            stage.decode(*live)
            leaving = [actor for actor in live if not actor.ahead]
            live = [actor for actor in live if actor.ahead]
            stage.leave(*leaving)
        marks += [mark for actor in leaving if actor.role for mark in _marks(actor)]
        stage.compare(PASS_TOKENS)
    return marks


def _marks(actor: Actor) -> list[Marks]:
    return [row[:: max(1, len(row) // WATCHED_LOGITS)].copy() for row in actor.request.logits]


def _difference(one: Sequence[Marks], other: Sequence[Marks]) -> npt.NDArray[np.float64]:
    """Return the largest difference of each token's logits; a NaN beside a number is infinite."""
    differences = [
        0.0 if np.array_equal(a, b, equal_nan=True) else float(np.nan_to_num(np.abs(a - b), nan=np.inf).max())
        for a, b in zip(one, other, strict=True)
    ]
    return np.array(differences)
