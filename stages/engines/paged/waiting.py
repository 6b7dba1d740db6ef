"""Scheduling of requests over a full pool, and prefix caching.

The youngest request is preempted. It loses its pages, and is computed again later: its prompt is prefilled again, and its
answer's tokens are decoded again one by one. Prefilling them would give other logits, because a prefill attends to its own
tokens exactly and decoding reads their codes.

Prefixes of prompts stay in the paged cache for later prompts that start with the same tokens. An engine prefills a prompt in
chunks. A chunk attends to itself exactly, and to earlier chunks through the cache, so only prefixes of whole chunks are kept:
later chunks read the same codes as without prefix caching, and answers are identical. A kept prefix is an ordinary sequence,
forked at the end of a chunk, with its own exact tokens and window. Its pages are shared by reference counting.

`engine` is a PagedEngine, which imports this module.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.core.errors import UserError
from stages.core.records import ServedRequest
from stages.engines.interface import Continuation, Logits
from stages.engines.paged.sequences import PoolFull
from stages.policies.policy import PAGE_TOKENS


class PrefixCache:
    """The prefixes that one engine keeps. The least recently used prefix is evicted first."""

    def __init__(self, engine: Any, *, chunk: int, most_tokens: int) -> None:
        """Create an empty cache.

        Raises:
            UserError: `chunk` is not a multiple of the page size, or `most_tokens` is less than one chunk.
        """
        if chunk % PAGE_TOKENS:
            raise UserError(f"prefill_chunk must be a multiple of {PAGE_TOKENS} where prefixes are kept, got {chunk}")
        if most_tokens < chunk:
            raise UserError(f"prefix_tokens must be 0 or at least prefill_chunk={chunk}, got {most_tokens}")
        self._engine, self._chunk, self._most = engine, chunk, most_tokens // chunk
        self.kept: dict[str, int] = {}
        """Sequence by the prefix's key, least recently used first. A prefix is evicted before its own shorter prefixes, so that
        every entry accounts for the pages of one chunk."""
        self.reused_tokens = 0
        """Number of tokens that were not prefilled because a kept prefix contained them."""

    def keys(self, prompt: Sequence[int]) -> list[str]:
        """Return the keys of a prompt's prefixes of one chunk, two chunks and so on, all shorter than the prompt.

        Two keys are equal if and only if the prefixes' tokens are equal.
        """
        digest = hashlib.sha256()
        keys = []
        for begin in range(0, len(prompt) - self._chunk, self._chunk):
            digest.update(np.array(prompt[begin : begin + self._chunk], np.int64).tobytes())
            keys.append(digest.hexdigest())
        return keys

    def begin(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Start a sequence with all chunks of a prompt except the last, and keep its new prefixes.

        Returns:
            The sequence's handle, and its number of tokens.

        Raises:
            UserError: The engine cannot hold the prompt. No sequence remains started.
        """
        keys = self.keys(prompt)
        kept = self._kept_prefixes(keys)
        self._use(keys[:kept])
        sequence = self._engine.fork(self.kept[keys[kept - 1]]) if kept else self._engine._start()
        self.reused_tokens += kept * self._chunk
        try:
            for number in range(kept, len(keys)):
                self._engine._prefill(sequence, prompt[number * self._chunk : (number + 1) * self._chunk])
                self._keep(keys[: number + 1], sequence)
        except UserError:
            self._engine.release([sequence])
            raise
        return sequence, len(keys) * self._chunk

    def longest(self, prompt: Sequence[int]) -> int | None:
        """Return the sequence of a prompt's longest kept prefix; None if no prefix is kept."""
        keys = self.keys(prompt)
        kept = self._kept_prefixes(keys)
        return self.kept[keys[kept - 1]] if kept else None

    def _kept_prefixes(self, keys: Sequence[str]) -> int:
        """Return how many of a prompt's prefixes are kept."""
        return next((number for number, key in enumerate(keys) if key not in self.kept), len(keys))

    def _keep(self, keys: Sequence[str], sequence: int) -> None:
        """Keep a fork of a sequence under the last key, if the next shorter prefix is kept; then evict down to the limit."""
        if len(keys) > 1 and keys[-2] not in self.kept:
            return
        self.kept[keys[-1]] = self._engine.fork(sequence)
        self._use(keys[:-1])
        while len(self.kept) > self._most:
            self.evict()

    def evict(self) -> bool:
        """Evict the least recently used prefix; return False if there was no prefix."""
        if not self.kept:
            return False
        self._engine.release([self.kept.pop(next(iter(self.kept)))])
        return True

    def _use(self, keys: Sequence[str]) -> None:
        """Mark prefixes as used, the shortest last, so that no prefix outlives its own shorter prefixes."""
        for key in reversed(keys):
            self.kept[key] = self.kept.pop(key)


def advance(engine: Any, live: Sequence[Continuation]) -> tuple[list[Continuation], Logits]:
    """Prefill the oldest waiting requests that fit into the pool; if none fits, decode one token of every running request.

    If a decode step finds no free page, the youngest running request is preempted. Returns the requests that advanced, and the
    logits (B, V) after their stored tokens. Raises PoolFull if a single request does not fit.
    """
    running = [request for request in live if request.sequence >= 0]
    joining = [request for request in live if request.sequence < 0]
    fitting = joining[: _fitting(engine, joining) or int(not running)]
    if fitting:
        try:
            return fitting, _join(engine, fitting)
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


def _fitting(engine: Any, joining: Sequence[Continuation]) -> int:
    """Return how many waiting requests to prefill now: at most one if prefixes are kept, so that the next can reuse them.

    Kept prefixes do not count as held, because they are evicted when a prefill needs their pages.
    """
    pool = engine.pool
    added = 0
    prefixes = set() if engine.prefixes is None else set(engine.prefixes.kept.values())
    held = {page for handle, sequence in pool.sequences.items() if handle not in prefixes for page in sequence.pages}
    for count, request in enumerate(joining[: None if engine.prefixes is None else 1]):
        prompt = request.tokens[: request.prompt_tokens]
        kept = engine.prefixes.longest(prompt) if engine.prefixes is not None else None
        shared = set(pool.sequences[kept].pages) if kept is not None else set()
        added += pool.pages_of(max(request.prompt_tokens, request.reached) + 1) - len(shared)
        held |= shared
        if len(held) + added > pool.max_pages:
            return count
    return count + 1 if joining else 0


def _join(engine: Any, joining: Sequence[Continuation]) -> Logits:
    before = engine.prefixes.reused_tokens if engine.prefixes is not None else 0
    logits: Logits
    handles, logits = engine.prefill([request.tokens[: request.prompt_tokens] for request in joining])
    for request, handle in zip(joining, handles, strict=True):
        request.sequence, request.stored = handle, request.prompt_tokens
    if engine.prefixes is not None:
        joining[0].reused += engine.prefixes.reused_tokens - before
    return logits


def _preempt(engine: Any, request: Continuation) -> None:
    engine.release([request.sequence])
    request.sequence = -1
    request.reached = request.stored
    request.stored = 0
    request.preempted += 1


@contextmanager
def pool_of(engine: Any, pages: int | None) -> Iterator[None]:
    """Limit the engine's pool to `pages` more pages and enable prefix caching, within this context.

    None: no limit and no prefix caching. Prompts are always prefilled in chunks of one page, so that prefixes of one page can
    be reused.
    """
    chunk, prefixes, most = engine.prefill_chunk, engine.prefixes, engine.pool.max_pages
    try:
        engine.prefill_chunk = PAGE_TOKENS
        engine.prefixes = None
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


def serve(engine: Any, requests: Sequence[tuple[Sequence[int], int]], rows: int) -> list[ServedRequest]:
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
    return [ServedRequest(np.stack(request.rows), request.preempted, request.reused, request.pages) for request in arrived]
