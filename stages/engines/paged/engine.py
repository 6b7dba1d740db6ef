"""The base class of all engines over a paged pool.

If the pool is full, the youngest request is preempted: it loses its pages and is computed again later. Its prompt is prefilled
again, and its answer's tokens are decoded again one by one. Prefilling these would give other logits, because a prefill attends
to its own tokens exactly and decoding reads their codes.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.core.records import MemoryReport, ServedRequest, StoredCopy
from stages.engines.base import ChunkedEngine, Mode, check_finite
from stages.engines.interface import Continuation, ForcedRequest, Logits, check_tokens
from stages.engines.paged.layout import StoredSide
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.sequences import PoolFull
from stages.policies.policy import PAGE_TOKENS, Side
from stages.policies.scales import KVScales


@dataclass(eq=False)
class _Request(Continuation):
    """A continuation whose tokens are all known in advance."""

    rows: deque[Logits] = field(default_factory=deque)
    """Logits (V) of the last tokens, the oldest first."""
    pages: tuple[int, ...] = ()


class PagedEngine(ChunkedEngine):
    def __init__(self, vocab_size: int, scales: KVScales, pool: PagedPool) -> None:
        super().__init__(pool.policy, pool.shape, vocab_size)
        self.pool = pool
        self._constants: dict[str, Any] = {}
        """Static scales and zeros that attention reads, float32 arrays by name, such as `key_scale.3`."""
        self._faults: dict[str, float] = {}
        """Array -> factor of `corrupt_key_scale` on the numbers that are written to it."""
        for layer in range(self.shape.layers):
            for stored in StoredSide.of_layer(self.policy, self.shape, layer).values():
                for name, values in stored.constant_values(scales, layer).items():
                    self._constants[f"{name}.{layer}"] = pool.constant(values)

    @abstractmethod
    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> Logits:
        """Append tokens `ids` (B, S) to sequences with reserved pages; return the logits (B, V) of the last tokens."""

    def _start(self) -> int:
        return self.pool.start()

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        moved, logits = self._schedule(live)
        rows = [row for row, request in enumerate(moved) if request.stored == len(request.tokens)]
        return [moved[row] for row in rows], logits[rows]

    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        for tokens, first in chain.from_iterable(rounds):
            self._check_forced(tokens, first)
        with self._limited_pool(pages):
            return [self._serve_together(requests, rows) for requests in rounds]

    @contextmanager
    def _limited_pool(self, pages: int | None) -> Iterator[None]:
        """Limit the pool to `pages` more pages within the context; None: no new limit.

        Prompts are prefilled in chunks of one page, so that they too read their earlier pages from the pool.
        """
        chunk, max_pages = self.prefill_chunk, self.pool.max_pages
        try:
            self.prefill_chunk = PAGE_TOKENS
            if pages is not None:
                self.pool.max_pages = self.pool.pages.used_count + pages
            yield
        finally:
            self.prefill_chunk, self.pool.max_pages = chunk, max_pages

    def _serve_together(self, requests: Sequence[ForcedRequest], rows: int) -> list[ServedRequest]:
        arrived = [_Request(list(tokens), first, len(tokens), rows=deque(maxlen=rows)) for tokens, first in requests]
        live = list(arrived)
        try:
            while live:
                moved, logits = self._schedule(live[: self.max_batch])
                for request, row in zip(moved, logits, strict=True):
                    assert isinstance(request, _Request)
                    if request.stored == request.prompt_tokens:
                        request.rows.clear()  # the prompt's own logits do not depend on the cache
                    else:
                        request.rows.append(row.copy())
                for request in [request for request in live if request.stored == len(request.tokens)]:
                    request.pages = tuple(self.pool.sequences[request.sequence].pages)
                    self.release([request.sequence])
                    live.remove(request)
        finally:
            self._release_all(live)
        return [ServedRequest(np.stack(request.rows), request.preempted, reused=0, pages=request.pages) for request in arrived]

    def _schedule(self, live: Sequence[Continuation]) -> tuple[list[Continuation], Logits]:
        """Prefill the oldest waiting requests that fit into the pool; if none fits, decode one token of every running request.

        If a decode step finds no free page, the youngest running request is preempted. Returns the requests that advanced, and
        their logits (B, V). Raises PoolFull if a single request does not fit.
        """
        running = [request for request in live if request.sequence >= 0]
        joining = [request for request in live if request.sequence < 0]
        fitting = joining[: self._count_fitting(joining) or int(not running)]
        if fitting:
            try:
                return fitting, self._prefill_requests(fitting)
            except PoolFull:
                if not running:
                    raise
        while True:
            try:
                logits = self.decode(
                    [request.sequence for request in running], [request.tokens[request.stored] for request in running]
                )
            except PoolFull:
                if len(running) == 1:
                    raise
                self._preempt(running.pop())
                continue
            for request in running:
                request.stored += 1
            return running, logits

    def _count_fitting(self, joining: Sequence[Continuation]) -> int:
        """Return how many waiting requests to prefill now."""
        pages = self.pool.pages.used_count
        for count, request in enumerate(joining):
            pages += self.pool.pages_needed(max(request.prompt_tokens, request.reached) + 1)
            if pages > self.pool.max_pages:
                return count
        return len(joining)

    def _preempt(self, request: Continuation) -> None:
        self.release([request.sequence])
        request.sequence = -1
        request.reached = request.stored
        request.stored = 0
        request.preempted += 1

    def fork(self, sequence: int) -> int:
        return self.pool.fork(sequence)

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        self.pool.reserve([sequence], len(prompt))
        for chunk in self._chunks(prompt):
            self.pool.reserve([sequence], len(chunk))  # with eviction, earlier chunks free pages that later chunks need
            logits = self._run("prefill", [sequence], np.array([chunk], np.int64))
        last: Logits = logits[0]
        return last

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        self.pool.reserve(sequences, 1)
        return self._run("decode", sequences, np.array(tokens, np.int64)[:, None])

    def _release(self, sequence: int) -> None:
        self.pool.release(sequence)

    def extend(self, sequence: int, tokens: Sequence[int]) -> Logits:
        """Append prompt tokens like the next chunk of a prefill. Raises UserError for tokens that are invalid or do not fit."""
        check_tokens(tokens, self.vocab_size)
        return self._prefill(sequence, tokens)

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        pools = self.pool.stored(sequence)
        lost = self.policy.evicted_pages(self.pool.length(sequence), self.shape)
        evicted = ((lost.start * PAGE_TOKENS, lost.stop * PAGE_TOKENS),) if lost else ()

        def copy(side: Side, layer: int) -> StoredCopy:
            first, codes = pools[f"{side}_pool.{layer}"]
            scale, zero = (pools.get(f"{side}_{name}_pool.{layer}") for name in ("scale", "zero"))
            static_scale, static_zero = (self._constants.get(f"{side}_{name}.{layer}") for name in ("scale", "zero"))
            return StoredCopy(
                first,
                codes,
                None if scale is None else scale[1].view(self.policy.sides(layer)[side].code.scale_storage.numpy),
                None if zero is None else zero[1].view(np.float16),
                None if static_scale is None else self.pool.on_host(static_scale)[0],
                None if static_zero is None else self.pool.on_host(static_zero)[0],
                () if side.in_window else evicted,
            )

        return [{side: copy(side, layer) for side in self.policy.sides(layer)} for layer in range(self.shape.layers)]

    def memory(self) -> MemoryReport:
        return self.pool.memory()

    def corrupt_key_scale(self, factor: float) -> None:
        for layer in range(self.shape.layers):
            for side, stored in StoredSide.of_layer(self.policy, self.shape, layer).items():
                if not side.is_key:
                    continue
                for target in [f"{name}.{layer}" for name in stored.fault_targets]:
                    if target in self._constants:
                        self._constants[target] *= factor
                    else:
                        self.pool.scale_array(target, factor)
                        self._faults[target] = self._faults.get(target, 1.0) * factor

    def _check_finite(self, sums: npt.NDArray[np.floating]) -> None:
        """Raise UserError if the graph's check found a key or value that is not finite."""
        check_finite((sums == 0).all((0, 2, 3)).reshape(self.shape.layers, 2, -1).all(-1))
