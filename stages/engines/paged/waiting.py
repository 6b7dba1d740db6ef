"""Scheduling of requests over a full pool: the youngest request is preempted and computed again later.

A preempted request loses its pages. Later its prompt is prefilled again, and its answer's tokens are decoded again one by one.
Prefilling them would give other logits, because a prefill attends to its own tokens exactly and decoding reads their codes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from stages.core.records import Pressed
from stages.engines.base import Logits
from stages.engines.capabilities import ForcedRequest
from stages.engines.interface import Continuation, Engine
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.prefixes import PrefixCache
from stages.engines.paged.sequences import PoolFull
from stages.policies.policy import PAGE_TOKENS


class PooledEngine(Engine):
    """An engine over a paged pool. It schedules requests; a subclass computes them."""

    pool: PagedPool
    prefixes: PrefixCache | None = None
    """Cache of prompts' prefixes; None disables prefix caching."""

    def fork(self, sequence: int) -> int:
        return self.pool.fork(sequence)

    def forget_prefixes(self) -> None:
        while self.prefixes is not None and self.prefixes.evict():
            pass

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        moved, logits = advance(self, live)
        rows = [row for row, one in enumerate(moved) if one.stored == len(one.tokens)]
        return [moved[row] for row in rows], logits[rows]

    def press(self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None) -> list[list[Pressed]]:
        for tokens, first in chain.from_iterable(rounds):
            self._check_forced(tokens, first)
        with pool_of(self, pages):
            return [serve(self, requests, rows) for requests in rounds]


def advance(engine: PooledEngine, live: Sequence[Continuation]) -> tuple[list[Continuation], Logits]:
    """Prefill the oldest waiting requests that fit into the pool; if none fits, decode one token of every running request.

    If a decode step finds no free page, the youngest running request is preempted. Returns the requests that advanced, and the
    logits (B, V) after their stored tokens. Raises PoolFull if a single request does not fit.
    """
    running = [one for one in live if one.sequence >= 0]
    joining = [one for one in live if one.sequence < 0]
    fitting = joining[: _fitting(engine, joining, running) or int(not running)]
    if fitting:
        try:
            return fitting, _join(engine, fitting)
        except PoolFull:
            if not running:
                raise
    while True:
        try:
            logits = engine.decode([one.sequence for one in running], [one.tokens[one.stored] for one in running])
        except PoolFull:
            if len(running) == 1:
                raise
            _preempt(engine, running.pop())
            continue
        for one in running:
            one.stored += 1
        return running, logits


def _fitting(engine: PooledEngine, joining: Sequence[Continuation], running: Sequence[Continuation]) -> int:
    """Return how many waiting requests to prefill now: at most one if prefixes are kept, so that the next can reuse them."""
    pool, added = engine.pool, 0
    held = {page for one in running for page in pool.sequences[one.sequence].pages}
    for count, one in enumerate(joining[: None if engine.prefixes is None else 1]):
        prompt = one.tokens[: one.prompt_tokens]
        kept = engine.prefixes.longest(prompt) if engine.prefixes is not None else None
        shared = set(pool.sequences[kept].pages) if kept is not None else set()
        added += pool.pages_of(max(one.prompt_tokens, one.reached) + 1) - len(shared)
        held |= shared
        if len(held) + added > pool.max_pages:
            return count
    return count + 1 if joining else 0


def _join(engine: PooledEngine, joining: Sequence[Continuation]) -> Logits:
    before = engine.prefixes.reused_tokens if engine.prefixes is not None else 0
    handles, logits = engine.prefill([one.tokens[: one.prompt_tokens] for one in joining])
    for one, handle in zip(joining, handles, strict=True):
        one.sequence, one.stored = handle, one.prompt_tokens
    if engine.prefixes is not None:
        joining[0].reused += engine.prefixes.reused_tokens - before
    return logits


def _preempt(engine: PooledEngine, one: Continuation) -> None:
    engine.release([one.sequence])
    one.sequence, one.reached, one.stored = -1, one.stored, 0
    one.preempted += 1


@contextmanager
def pool_of(engine: PooledEngine, pages: int | None) -> Iterator[None]:
    """Limit the engine's pool to `pages` more pages and enable prefix caching, within this context.

    None: no limit and no prefix caching. Prompts are always prefilled in chunks of one page, so that prefixes of one page can
    be reused.
    """
    chunk, prefixes, most = engine.prefill_chunk, engine.prefixes, engine.pool.max_pages
    try:
        engine.prefill_chunk, engine.prefixes = PAGE_TOKENS, None
        if pages is not None:
            engine.prefixes = PrefixCache(engine, chunk=PAGE_TOKENS, most_tokens=pages * PAGE_TOKENS)
            engine.pool.max_pages = engine.pool.pages.used_count + pages
        yield
    finally:
        engine.forget_prefixes()
        engine.prefill_chunk, engine.prefixes, engine.pool.max_pages = chunk, prefixes, most


@dataclass(eq=False)
class _Request(Continuation):
    """A continuation whose tokens are all known in advance."""

    rows: deque[Logits] = field(default_factory=deque)
    """Logits (V) of the last tokens, the oldest first."""
    pages: tuple[int, ...] = ()


def serve(engine: PooledEngine, requests: Sequence[tuple[Sequence[int], int]], rows: int) -> list[Pressed]:
    """Run requests (forced tokens, prompt length) that arrive together; return the logits of their last `rows` tokens."""
    arrived = [_Request(list(tokens), first, len(tokens), rows=deque(maxlen=rows)) for tokens, first in requests]
    live = list(arrived)
    try:
        while live:
            moved, logits = advance(engine, live[: engine.max_batch])
            for one, row in zip(moved, logits, strict=True):
                assert isinstance(one, _Request)
                if one.stored == one.prompt_tokens:
                    one.rows.clear()  # the prompt's own logits do not depend on the cache
                else:
                    one.rows.append(row.copy())
            for one in [one for one in live if one.stored == len(one.tokens)]:
                one.pages = tuple(engine.pool.sequences[one.sequence].pages)
                engine.release([one.sequence])
                live.remove(one)
    finally:
        engine.release([one.sequence for one in live if one.sequence >= 0])
    return [Pressed(np.stack(one.rows), one.preempted, one.reused, one.pages) for one in arrived]
