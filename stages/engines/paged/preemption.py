"""Scheduling of requests over a full pool.

The youngest request is preempted: it loses its pages and is computed again later. Its prompt is prefilled again, and its
answer's tokens are decoded again one by one. Prefilling these would give other logits, because a prefill attends to its own
tokens exactly and decoding reads their codes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from stages.core.records import ServedRequest
from stages.engines.interface import Continuation, Logits
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.sequences import PoolFull
from stages.policies.policy import PAGE_TOKENS


class PooledEngine(Protocol):
    """The part of a PagedEngine that request scheduling uses."""

    pool: PagedPool
    prefill_chunk: int
    max_batch: int | None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]: ...
    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits: ...
    def release(self, sequences: Sequence[int]) -> None: ...


def advance(engine: PooledEngine, live: Sequence[Continuation]) -> tuple[list[Continuation], Logits]:
    """Prefill the oldest waiting requests that fit into the pool; if none fits, decode one token of every running request.

    If a decode step finds no free page, the youngest running request is preempted. Returns the requests that advanced, and the
    logits (B, V) after their stored tokens. Raises PoolFull if a single request does not fit.
    """
    running = [request for request in live if request.sequence >= 0]
    joining = [request for request in live if request.sequence < 0]
    fitting = joining[: _count_fitting(engine, joining) or int(not running)]
    if fitting:
        try:
            return fitting, _prefill_requests(engine, fitting)
        except PoolFull:
            if not running:
                raise
    while True:
        try:
            logits = engine.decode(
                [request.sequence for request in running], [request.tokens[request.stored] for request in running]
            )
        except PoolFull:
            if len(running) == 1:
                raise
            _preempt(engine, running.pop())
            continue
        for request in running:
            request.stored += 1
        return running, logits


def _count_fitting(engine: PooledEngine, joining: Sequence[Continuation]) -> int:
    """Return how many waiting requests to prefill now."""
    pool = engine.pool
    pages = pool.pages.used_count
    for count, request in enumerate(joining):
        pages += pool.pages_needed(max(request.prompt_tokens, request.reached) + 1)
        if pages > pool.max_pages:
            return count
    return len(joining)


def _prefill_requests(engine: PooledEngine, joining: Sequence[Continuation]) -> Logits:
    logits: Logits
    handles, logits = engine.prefill([request.tokens[: request.prompt_tokens] for request in joining])
    for request, handle in zip(joining, handles, strict=True):
        request.sequence, request.stored = handle, request.prompt_tokens
    return logits


def _preempt(engine: PooledEngine, request: Continuation) -> None:
    engine.release([request.sequence])
    request.sequence = -1
    request.reached = request.stored
    request.stored = 0
    request.preempted += 1


@contextmanager
def limited_pool(engine: PooledEngine, pages: int | None) -> Iterator[None]:
    """Within this context, limit the engine's pool to `pages` more pages; if `pages` is None, its limit stays unchanged.

    Prompts are prefilled in chunks of one page, so that they too read their earlier pages from the pool.
    """
    chunk, max_pages = engine.prefill_chunk, engine.pool.max_pages
    try:
        engine.prefill_chunk = PAGE_TOKENS
        if pages is not None:
            engine.pool.max_pages = engine.pool.pages.used_count + pages
        yield
    finally:
        engine.prefill_chunk, engine.pool.max_pages = chunk, max_pages


@dataclass(eq=False)
class _Request(Continuation):
    """A continuation whose tokens are all known in advance."""

    rows: deque[Logits] = field(default_factory=deque)
    """Logits (V) of the last tokens, the oldest first."""
    pages: tuple[int, ...] = ()


def serve_together(engine: PooledEngine, requests: Sequence[tuple[Sequence[int], int]], rows: int) -> list[ServedRequest]:
    """Run requests (forced tokens, prompt length) that arrive together; return the logits of their last `rows` tokens."""
    arrived = [_Request(list(tokens), first, len(tokens), rows=deque(maxlen=rows)) for tokens, first in requests]
    live = list(arrived)
    try:
        while live:
            moved, logits = advance(engine, live[: engine.max_batch])
            for request, row in zip(moved, logits, strict=True):
                assert isinstance(request, _Request)
                if request.stored == request.prompt_tokens:
                    request.rows.clear()  # the prompt's own logits do not depend on the cache
                else:
                    request.rows.append(row.copy())
            for request in [request for request in live if request.stored == len(request.tokens)]:
                request.pages = tuple(engine.pool.sequences[request.sequence].pages)
                engine.release([request.sequence])
                live.remove(request)
    finally:
        engine.release([request.sequence for request in live if request.sequence >= 0])
    return [ServedRequest(np.stack(request.rows), request.preempted, reused=0, pages=request.pages) for request in arrived]
