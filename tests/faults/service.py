"""A simulated service, identical for every engine. The difference from the sound engine's outputs is the fault's cost.

No gate takes part. An engine is compared with the same engine without the fault, whose logits are bit-for-bit repeatable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import log_softmax

from faults.record import Cost
from stages.core.errors import UserError
from stages.engines.interface import Engine, Logits, SupportsFork

LENGTHS = (3, 17, 64, 65, 130, 300, 40, 200, 30, 30, 129, 63)
"""Prompt lengths in tokens of the crowded requests. Two of the prompts are equal and end within a page."""


@dataclass
class ServiceRun:
    """Outputs of an engine over a service."""

    rows: list[Logits] = field(default_factory=list)
    """Logits of every prompt and of every decoded token."""
    answers: list[list[int]] = field(default_factory=list)
    error: str = ""


class ServiceClient:
    """Client that sends random tokens from a fixed seed and records the results."""

    def __init__(self, engine: Any, run: ServiceRun) -> None:
        self.engine, self.run, self.rng = engine, run, np.random.default_rng(7)

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def prompts(self, *lengths: int) -> list[list[int]]:
        return [self.tokens(length) for length in lengths]

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        handles: list[int]
        handles, logits = self.engine.prefill(prompts)
        self.run.rows.extend(logits.copy())
        return handles

    def decode(self, handles: Sequence[int], steps: int) -> None:
        for _ in range(steps):
            self.run.rows.extend(self.engine.decode(handles, self.tokens(len(handles))).copy())

    def extend(self, handle: int, count: int) -> None:
        self.run.rows.append(self.engine.extend(handle, self.tokens(count)).copy())

    def fork(self, handle: int) -> int:
        child: int = self.engine.fork(handle)
        return child

    def serve(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        """Prefill prompts together, decode the same number of tokens, and release them."""
        handles = self.start(prompts)
        self.decode(handles, steps)
        self.engine.release(handles)

    def generate(self, prompts: Sequence[Sequence[int]], *given: Any, **options: Any) -> None:
        self.run.answers += self.engine.generate(prompts, *given, **options)


def serve(engine: Engine, *, long: bool) -> ServiceRun:
    """Run a short service, or a `long` one that also covers rare situations."""
    run = ServiceRun()
    client = ServiceClient(engine, run)
    forks = isinstance(engine, SupportsFork)
    rest = [*([_conversation, _many_forks, _large_step] if forks else []), _answers, _alone, _many, *[_crowd] * 7, _borders]
    try:
        for part in (_large_batch, *([_turns] if forks else []), _prefixes, _crowd, *(rest if long else [])):
            part(client)
    except (UserError, KeyError, IndexError, AssertionError) as error:
        run.error = f"{type(error).__name__}: {error}"
    return run


def _large_batch(client: ServiceClient) -> None:
    """Decode 20 requests, short and long, that finish in turn."""
    handles = client.start(client.prompts(*(205 if row % 3 == 0 else 5 + row for row in range(20))))
    while handles:
        client.decode(handles, 1)
        client.engine.release([handles.pop(len(handles) // 2)])


def _turns(client: ServiceClient) -> None:
    """Serve conversations: chunks after decoded tokens, at and across page borders, and forks that diverge and continue."""
    for prompt, decoded, turns in ((50, 14, (30, 64)), (100, 20, (1, 9)), (800, 5, (120, 40))):
        (origin,) = client.start(client.prompts(prompt))
        client.decode([origin], decoded)
        fork = client.fork(origin)
        for turn in turns:
            client.extend(origin, turn)
            client.decode([origin, fork], 4)
        client.extend(fork, turns[0])
        client.engine.release([origin])
        others = client.start(client.prompts(prompt, 70))
        client.decode([*others, fork], 4)
        second = client.fork(fork)
        client.decode([second, fork], 2)
        client.engine.release([*others, fork, second])


def _prefixes(client: ServiceClient) -> None:
    """Serve prompts with common beginnings, prompts that differ first and then contain equal pages, and equal prompts."""
    system, page = client.prompts(128, 128)
    prompts = [[*system, *page, *client.tokens(20)] for _ in range(2)] + [[*client.tokens(128), *page, *client.tokens(9)]]
    prompts += [client.tokens(300), [*system, *page, *client.tokens(5)]]
    handles = [handle for prompt in prompts for handle in client.start([prompt])]
    client.decode(handles, 3)
    client.engine.release(handles)
    client.serve(client.prompts(100) * 2, 30)


def _crowd(client: ServiceClient) -> None:
    """Serve crowded requests of all lengths that arrive and finish at different times, then answer more than fit at once."""
    waiting = client.prompts(*LENGTHS * 2)
    waiting[9] = waiting[8]
    live: list[tuple[int, int]] = []
    number = 0
    while waiting or live:
        if waiting and len(live) < 13:
            arrived, waiting = waiting[: 13 - len(live)], waiting[13 - len(live) :]
            live += [(handle, 4 + (number + at) * 7 % 40) for at, handle in enumerate(client.start(arrived))]
            number += len(arrived)
        client.decode([handle for handle, _ in live], 1)
        client.engine.release([handle for handle, left in live if left == 1])
        live = [(handle, left - 1) for handle, left in live if left > 1]
    client.generate(client.prompts(5, 66, 350, 12, 30, 700), [40, 12, 6, 20, 3, 10], (), max_sequences=3)


def _alone(client: ServiceClient) -> None:
    """Serve a long prompt, a long answer, and many short requests in succession."""
    for prompt, steps in ((1190, 6), (20, 345), *[(9, 43)] * 50):
        client.serve(client.prompts(prompt), steps)


def _many(client: ServiceClient) -> None:
    """Serve 270 short requests together."""
    client.serve(client.prompts(*(4 + row % 10 for row in range(270))), 3)


def _conversation(client: ServiceClient) -> None:
    """Serve a conversation with further turns, some longer than a page, two of them without an answer between, and a fork."""
    (origin,) = client.start(client.prompts(1000))
    for turn in (150, 100, 5, 40, 64, 90):
        client.decode([origin], 3)
        client.extend(origin, turn)
    client.extend(origin, 300)
    fork = client.fork(origin)
    client.decode([fork, origin], 4)
    client.extend(fork, 70)
    client.decode([origin, fork], 4)
    client.engine.release([origin, fork])


def _many_forks(client: ServiceClient) -> None:
    """Decode twenty forks of one prefix, including forks of forks. Most finish and new requests arrive."""
    (origin,) = client.start(client.prompts(190))
    rows = [client.fork(origin) for _ in range(16)]
    for _ in range(4):
        rows.append(client.fork(rows[-1]))
    client.decode(rows, 4)
    client.engine.release([origin, *rows[:14]])
    rows = [*rows[14:], *client.start(client.prompts(100, 64))]
    client.decode(rows, 6)
    client.engine.release(rows)


def _large_step(client: ServiceClient) -> None:
    """Prefill prompts of whole tiles and chunks, then decode across their borders with over 10,240 tokens in a step."""
    rows = client.start(client.prompts(256, 512, 510, 640, 1022, 700, 900))
    rows += [client.fork(rows[-1]) for _ in range(9)]
    client.decode(rows, 6)
    client.engine.release(rows)


def _answers(client: ServiceClient) -> None:
    """Generate a long answer, many queued answers, equal first pages, and answers that stop."""
    client.generate(client.prompts(40), 200, ())
    client.generate(client.prompts(*(3 + row % 10 for row in range(150))), 3, (), max_sequences=16)
    pages, begin = client.prompts(130, 200)
    client.generate([[*pages, *client.tokens(9)] for _ in range(3)], 6, ())
    (answer,) = client.engine.generate([begin], 150, ())
    client.run.answers.append(answer)
    for stop in list(dict.fromkeys(answer))[:6]:
        client.generate([begin], 12, (stop,))


def _borders(client: ServiceClient) -> None:
    """Serve prompts that part near the end of a page or chunk, and rows that change places."""
    begin = client.tokens(200)
    changed = [[*begin[:place], *client.tokens(1), *begin[place + 1 :]] for place in (50, 62, 127)]
    rows = client.start([begin, *changed, *client.prompts(208, 176)])
    client.decode(rows, 3)
    client.decode([rows[0], *rows[-2:0:-1], rows[-1]], 2)
    client.engine.release(rows)
    for prompt in (begin, *changed):
        client.serve([prompt], 3)


def cost(sound: ServiceRun, faulty: ServiceRun) -> Cost:
    """Compare a faulty engine's outputs with a sound engine's."""
    pairs = list(zip(sound.rows, faulty.rows, strict=False))
    differing = [pair for pair in pairs if not np.array_equal(*pair)]
    rows = [np.array([pair[i] for pair in differing] or np.zeros((1, 1)), np.float64) for i in range(2)]
    exact, other = (log_softmax(logits, axis=1) for logits in rows)
    distances = (np.exp(exact) * (exact - other)).sum(axis=1)
    changed = int((exact.argmax(axis=1) != other.argmax(axis=1)).sum())
    changed += sum(answer != expected for answer, expected in zip(faulty.answers, sound.answers, strict=False))
    worst = float(np.nan_to_num(distances, nan=1e9, posinf=1e9).max())
    return Cost(worst_kl=worst, rows=len(differing) / max(len(pairs), 1), changed=changed, error=faulty.error[:200])
