"""A simulated day of service, identical for every engine. The difference from the sound engine's day is the fault's cost.

No gate takes part. An engine is compared with the same engine without the fault, whose logits are bit-for-bit repeatable.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from faults.record import Cost
from stages.core.errors import UserError
from stages.engines.interface import Engine, Logits, SupportsExtend, SupportsFork, SupportsFullPool

LENGTHS = (3, 17, 64, 65, 130, 300, 40, 200, 30, 30, 129, 63)
"""Prompt lengths in tokens of the crowded requests. Two of the prompts are equal and end within a page."""


@dataclass
class Day:
    """Outputs of an engine over a day."""

    rows: list[Logits]
    """Logits of every prompt and of every decoded token."""
    answers: list[list[int]]
    error: str = ""


class _Desk:
    """Client that sends random tokens from a fixed seed and records the results."""

    def __init__(self, engine: Any, day: Day, seed: int) -> None:
        self.engine, self.day, self.rng = engine, day, np.random.default_rng(seed)

    def tokens(self, count: int) -> list[int]:
        found: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return found

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles: list[int]
        handles, logits = self.engine.prefill(prompts)
        self.day.rows.extend(logits.copy())
        return handles

    def decode(self, handles: Sequence[int], steps: int) -> None:
        for _ in range(steps):
            self.day.rows.extend(self.engine.decode(handles, self.tokens(len(handles))).copy())

    def extend(self, handle: int, count: int) -> None:
        self.day.rows.append(self.engine.extend(handle, self.tokens(count)).copy())


def serve(engine: Engine, *, long: bool) -> Day:
    """Serve a short day, or a `long` day that also covers rare situations."""
    day = Day([], [])
    try:
        desk = _Desk(engine, day, 7)
        turns = [_turns] if isinstance(engine, SupportsFork) else []
        forks = [_conversation, _many_forks, _large_step] if isinstance(engine, SupportsFork) else []
        pools = [_full_pool] if isinstance(engine, SupportsFullPool) else []
        rest = [_schedule, _answers, *pools, _alone, _many, *[_crowd] * 7, _idle_and_worn, _borders]
        more = [*forks, *rest] if long else []
        for part in (_large_batch, *turns, _prefixes, _generated, _crowd, *more):
            part(desk)
    except (UserError, KeyError, IndexError, AssertionError) as error:
        day.error = f"{type(error).__name__}: {error}"
    return day


def _large_batch(desk: _Desk) -> None:
    """Decode 20 requests, short and long, that finish in turn."""
    handles = desk.start([desk.tokens(205 if row % 3 == 0 else 5 + row) for row in range(20)])
    while handles:
        desk.decode(handles, 1)
        desk.engine.release([handles.pop(len(handles) // 2)])


def _alone(desk: _Desk) -> None:
    """Serve a long prompt, a long answer, and a prompt of 64 + 51 tokens."""
    for prompt, steps in ((1190, 6), (20, 345), (115, 5)):
        handles = desk.start([desk.tokens(prompt)])
        desk.decode(handles, steps)
        desk.engine.release(handles)


def _turns(desk: _Desk) -> None:
    """Serve conversations: chunks after decoded tokens, at and across page borders, and forks that diverge and continue."""
    for prompt, decoded, turns in ((50, 14, (30, 64)), (100, 20, (1, 9)), (800, 5, (120, 40))):
        (origin,) = desk.start([desk.tokens(prompt)])
        desk.decode([origin], decoded)
        fork = desk.engine.fork(origin)
        for turn in turns:
            desk.extend(origin, turn)
            desk.decode([origin, fork], 4)
        desk.extend(fork, turns[0])
        desk.engine.release([origin])
        others = desk.start([desk.tokens(prompt), desk.tokens(70)])
        desk.decode([*others, fork], 4)
        second = desk.engine.fork(fork)
        desk.decode([second, fork], 2)
        desk.engine.release([*others, fork, second])


def _prefixes(desk: _Desk) -> None:
    """Serve prompts with common beginnings. Some differ first and then contain equal pages."""
    system, page = desk.tokens(128), desk.tokens(128)
    prompts = [[*system, *page, *desk.tokens(20)] for _ in range(2)] + [[*desk.tokens(128), *page, *desk.tokens(9)]]
    prompts += [desk.tokens(300), [*system, *page, *desk.tokens(5)]]
    handles = [handle for prompt in prompts for handle in desk.start([prompt])]
    desk.decode(handles, 3)
    desk.engine.release(handles)
    equal = desk.tokens(100)
    handles = desk.start([equal, equal])
    desk.decode(handles, 30)
    desk.engine.release(handles)


def _generated(desk: _Desk) -> None:
    """Generate answers to more prompts of different lengths than may run at once."""
    prompts = [desk.tokens(length) for length in (5, 66, 350, 12, 30, 700)]
    desk.day.answers += desk.engine.generate(prompts, [40, 12, 6, 20, 3, 10], (), max_sequences=3)


def _crowd(desk: _Desk) -> None:
    """Serve crowded requests of all lengths that arrive and finish at different times."""
    waiting = [desk.tokens(length) for length in LENGTHS * 2]
    waiting[9] = waiting[8]
    live: list[tuple[int, int]] = []
    number = 0
    while waiting or live:
        if waiting and len(live) < 13:
            arrived, waiting = waiting[: 13 - len(live)], waiting[13 - len(live) :]
            live += [(handle, 4 + (number + at) * 7 % 40) for at, handle in enumerate(desk.start(arrived))]
            number += len(arrived)
        desk.decode([handle for handle, _ in live], 1)
        desk.engine.release([handle for handle, left in live if left == 1])
        live = [(handle, left - 1) for handle, left in live if left > 1]


def _many(desk: _Desk) -> None:
    """Serve short requests: many at once, then many in succession."""
    for size, batches in ((270, 1), (10, 40)):
        for _ in range(batches):
            handles = desk.start([desk.tokens(4 + row % 10) for row in range(size)])
            desk.decode(handles, 3)
            desk.engine.release(handles)


def _conversation(desk: _Desk) -> None:
    """Serve a conversation with six further turns, some longer than a page, and a late fork."""
    (origin,) = desk.start([desk.tokens(1000)])
    for turn in (150, 100, 5, 40, 64, 90):
        desk.decode([origin], 3)
        desk.extend(origin, turn)
    fork = desk.engine.fork(origin)
    desk.decode([fork, origin], 4)
    desk.extend(fork, 70)
    desk.decode([origin, fork], 4)
    desk.engine.release([origin, fork])


def _many_forks(desk: _Desk) -> None:
    """Decode twelve forks of one prefix, including forks of forks. Most finish and new requests arrive."""
    (origin,) = desk.start([desk.tokens(190)])
    rows = [desk.engine.fork(origin) for _ in range(10)]
    rows += [desk.engine.fork(rows[-1])]
    rows += [desk.engine.fork(rows[-1])]
    desk.decode(rows, 4)
    desk.engine.release([origin, *rows[:8]])
    fresh = desk.start([desk.tokens(100), desk.tokens(64)])
    desk.decode([*rows[8:], *fresh], 6)
    desk.engine.release([*rows[8:], *fresh])


def _large_step(desk: _Desk) -> None:
    """Prefill prompts of whole tiles and chunks, then decode across their borders with over 10,240 tokens in a step."""
    rows = desk.start([desk.tokens(length) for length in (256, 512, 510, 1022, 700, 900)])
    rows += [desk.engine.fork(rows[-1]) for _ in range(9)]
    desk.decode(rows, 6)
    desk.engine.release(rows)


def _schedule(desk: _Desk) -> None:
    """Reorder, skip and idle rows; cancel one request, and finish another with a full page."""
    rows = desk.start([desk.tokens(length) for length in (30, 70, 110, 150)])
    desk.decode(rows, 2)
    desk.engine.release(desk.start([desk.tokens(50)]))
    ending = desk.start([desk.tokens(60)])
    desk.decode([*ending, *rows], 4)
    desk.engine.release(ending)
    late = desk.start([desk.tokens(90)])
    desk.decode([*rows, *late], 4)
    for number in range(8):
        desk.decode([rows[place] for place in desk.rng.permutation(4)[: 1 + number % 4]], 1)
    desk.decode(rows[:2], 70)
    desk.decode(rows[::-1], 3)
    desk.engine.release([*rows, *late])


def _answers(desk: _Desk) -> None:
    """Generate a long answer, many queued answers, one prompt with two limits, equal first pages, and stop tokens."""
    say, pages, again = desk.engine.generate, desk.tokens(130), desk.tokens(50)
    said = [*say([desk.tokens(40)], 200, ()), *say([again], 4, ()), *say([again], 10, ())]
    said += say([desk.tokens(3 + row % 10) for row in range(150)], 3, (), max_sequences=16)
    said += say([[*pages, *desk.tokens(9)] for _ in range(3)], 6, ())
    desk.day.answers += [*said, *say([again], 10, said[1][:1]), *say([again], 10, said[2][5:6])]


def _full_pool(desk: _Desk) -> None:
    """Serve more requests than the pool can hold: a third fit. Some prompts begin with the same page."""
    page = desk.tokens(64)
    prompts = [[*(page if row % 2 else desk.tokens(64)), *desk.tokens(120 + 7 * row)] for row in range(12)]
    for served in desk.engine.serve_rounds([[(prompt, len(prompt) - 40) for prompt in prompts]], 32, 16)[0]:
        desk.day.rows.extend(served.logits)


def _idle_and_worn(desk: _Desk) -> None:
    """Decode a pair, idle for four seconds, take turns in succession, and decode 4,300 steps in requests of 43 steps."""
    handles = desk.start([desk.tokens(70), desk.tokens(40)])
    desk.decode(handles, 3)
    time.sleep(4)
    if isinstance(desk.engine, SupportsExtend):
        for turn in (11, 400, 7):  # the first after a rest, the second longer than a window
            desk.extend(handles[1], turn)
    desk.decode(handles, 3)
    desk.engine.release(handles)
    for _ in range(100):
        handles = desk.start([desk.tokens(5), desk.tokens(9)])
        desk.decode(handles, 43)
        desk.engine.release(handles)


def _borders(desk: _Desk) -> None:
    """Serve prompts of whole tiles, prompts that part near the end of a page or chunk, full pages, and answers that stop."""
    begin = desk.tokens(200)
    changed = [[*begin[:place], *desk.tokens(1), *begin[place + 1 :]] for place in (50, 62, 127)]
    rows = desk.start([desk.tokens(length) for length in (208, 176, 144)])
    rows += desk.start([begin, *changed])
    desk.decode(rows, 3)
    desk.decode([rows[0], *rows[-2:0:-1], rows[-1]], 2)  # the middle rows change places
    desk.engine.release(rows)
    for prompt in (begin, *changed):
        (alone,) = desk.start([prompt])
        desk.decode([alone], 3)
        desk.engine.release([alone])
    ending, *rows = desk.start([desk.tokens(length) for length in (126, 30, 150)])
    rows += desk.start([desk.tokens(90)])
    desk.decode([ending, *rows], 2)
    desk.engine.release([ending])  # its two pages are full
    rows += desk.start([desk.tokens(100), desk.tokens(180)])
    desk.decode(rows, 6)
    desk.engine.release(rows)
    (answer,) = desk.engine.generate([begin], 150, ())
    for stop in list(dict.fromkeys(answer))[:6]:
        desk.day.answers += desk.engine.generate([begin], 12, (stop,))
    desk.day.answers += [answer]


def cost(sound: Day, faulty: Day) -> Cost:
    """Compare a faulty engine's day with a sound engine's."""
    pairs = list(zip(sound.rows, faulty.rows, strict=False))
    differing = [pair for pair in pairs if not np.array_equal(*pair)]
    rows = [np.array([pair[i] for pair in differing] or np.zeros((1, 1)), np.float64) for i in range(2)]
    exact, other = (log_softmax(some, axis=1) for some in rows)
    distances = (np.exp(exact) * (exact - other)).sum(axis=1)
    changed = int((exact.argmax(axis=1) != other.argmax(axis=1)).sum())
    changed += sum(one != said for one, said in zip(sound.answers, faulty.answers, strict=False))
    worst = float(np.nan_to_num(distances, nan=1e9, posinf=1e9).max())
    return Cost(worst_kl=worst, rows=len(differing) / max(len(pairs), 1), changed=changed, error=faulty.error[:200])
