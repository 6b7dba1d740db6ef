"""Prefix caching: prompt prefixes stay in the paged cache for later prompts that start with the same tokens.

An engine prefills a prompt in chunks. A chunk attends to itself exactly, and to earlier chunks through the cache, so only
prefixes of whole chunks are kept: later chunks read the same codes as without prefix caching, and answers are identical. A kept
prefix is an ordinary sequence, forked at the end of a chunk, with its own exact tokens and window. Its pages are shared by
reference counting.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stages.core.errors import UserError
from stages.engines.interface import Logits
from stages.engines.paged.pool import PagedPool
from stages.policies.policy import PAGE_TOKENS


class PooledEngine(Protocol):
    """The part of a PagedEngine that prefix caching and request scheduling use."""

    pool: PagedPool
    prefixes: "PrefixCache | None"
    prefill_chunk: int
    max_batch: int | None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]: ...
    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits: ...
    def fork(self, sequence: int) -> int: ...
    def release(self, sequences: Sequence[int]) -> None: ...
    def forget_prefixes(self) -> None: ...
    def _start(self) -> int: ...
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits: ...


class PrefixCache:
    """The prompt prefixes that an engine keeps. The least recently used prefix is evicted first."""

    def __init__(self, engine: PooledEngine, *, chunk: int, most_tokens: int) -> None:
        """Create an empty cache.

        Raises:
            UserError: `chunk` is not a multiple of the page size, or `most_tokens` is less than one chunk.
        """
        if chunk % PAGE_TOKENS:
            raise UserError(f"prefill_chunk must be a multiple of {PAGE_TOKENS} if prefixes are kept, got {chunk}")
        if most_tokens < chunk:
            raise UserError(f"prefix_tokens must be 0 or at least prefill_chunk={chunk}, got {most_tokens}")
        self._engine, self._chunk, self._max_prefixes = engine, chunk, most_tokens // chunk
        self.kept: dict[str, int] = {}
        """Prefix key -> sequence, least recently used first. A prefix is evicted before its own shorter prefixes, so that
        every entry accounts for the pages of one chunk."""
        self.reused_tokens = 0
        """Number of tokens that were not prefilled because a kept prefix contained them."""

    def keys(self, prompt: Sequence[int]) -> list[str]:
        """Return the keys of a prompt's prefixes of one chunk, two chunks, and so on, all shorter than the prompt.

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
            UserError: The prompt does not fit into the engine. The new sequence is released.
        """
        keys = self.keys(prompt)
        count = self._kept_prefixes(keys)
        self._mark_used(keys[:count])
        sequence = self._engine.fork(self.kept[keys[count - 1]]) if count else self._engine._start()
        self.reused_tokens += count * self._chunk
        try:
            for number in range(count, len(keys)):
                self._engine._prefill(sequence, prompt[number * self._chunk : (number + 1) * self._chunk])
                self._keep(keys[: number + 1], sequence)
        except BaseException:
            self._engine.release([sequence])
            raise
        return sequence, len(keys) * self._chunk

    def longest_prefix(self, prompt: Sequence[int]) -> int | None:
        """Return the sequence of a prompt's longest kept prefix; None if none of its prefixes is kept."""
        keys = self.keys(prompt)
        count = self._kept_prefixes(keys)
        return self.kept[keys[count - 1]] if count else None

    def _kept_prefixes(self, keys: Sequence[str]) -> int:
        """Return how many of a prompt's prefixes are kept."""
        return next((number for number, key in enumerate(keys) if key not in self.kept), len(keys))

    def _keep(self, keys: Sequence[str], sequence: int) -> None:
        """Keep a fork of a sequence under the last key if the next shorter prefix is kept; then evict down to the limit."""
        if len(keys) > 1 and keys[-2] not in self.kept:
            return
        self.kept[keys[-1]] = self._engine.fork(sequence)
        self._mark_used(keys[:-1])
        while len(self.kept) > self._max_prefixes:
            self.evict()

    def evict(self) -> bool:
        """Evict the least recently used prefix; return False if there was no prefix."""
        if not self.kept:
            return False
        self._engine.release([self.kept.pop(next(iter(self.kept)))])
        return True

    def _mark_used(self, keys: Sequence[str]) -> None:
        """Mark prefixes as used, the shortest last, so that no prefix outlives its own shorter prefixes."""
        for key in reversed(keys):
            self.kept[key] = self.kept.pop(key)
