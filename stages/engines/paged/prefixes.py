"""Beginnings of prompts that stay in a paged cache, for later prompts that begin alike.

An engine prefills a prompt in chunks. A chunk attends to itself exactly and to all before it through the cache, whether that
was written a moment ago or for another prompt. So only beginnings of whole chunks are kept and found: the chunks after them
are computed from the same codes as without, and answers are the same. A beginning that ends within a chunk would be read as
codes by tokens that attend to it exactly otherwise.

A kept beginning is a sequence like any other, forked at the end of a chunk. It shares its pages by counting users, and has
exact tokens and a window of its own, so that every policy can be kept.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS


class PrefixCache:
    """The beginnings that one engine keeps, the least recently used of which go first."""

    def __init__(self, engine: Engine, *, chunk: int, most_tokens: int) -> None:
        """Keep nothing yet.

        Raises:
            UserError: Chunks are not whole pages, or not one of them may be kept.
        """
        if chunk % PAGE_TOKENS:
            raise UserError(f"prefill_chunk must be a multiple of {PAGE_TOKENS} where prefixes are kept, got {chunk}")
        if most_tokens < chunk:
            raise UserError(f"prefix_tokens must be 0 or at least prefill_chunk={chunk}, got {most_tokens}")
        self._engine, self._chunk, self._most = engine, chunk, most_tokens // chunk
        self.kept: dict[str, int] = {}
        """Key of a beginning -> its sequence, the least recently used first. A beginning is kept no longer than those that it
        continues, so that each takes the pages of one chunk."""
        self.reused_tokens = 0
        """Tokens that were not prefilled because they were found."""

    def keys(self, prompt: Sequence[int]) -> list[str]:
        """Return the keys of a prompt's beginnings of one chunk, of two, and so on, all of them shorter than the prompt.

        Two keys are equal where the tokens are.
        """
        digest, keys = hashlib.sha256(), []
        for begin in range(0, len(prompt) - self._chunk, self._chunk):
            digest.update(np.array(prompt[begin : begin + self._chunk], np.int64).tobytes())
            keys.append(digest.hexdigest())
        return keys

    def begin(
        self, prompt: Sequence[int], start: Callable[[], int], prefill: Callable[[int, Sequence[int]], object]
    ) -> tuple[int, int]:
        """Start a sequence with all of a prompt but its last chunk, and keep what was not kept yet.

        Returns:
            The sequence, and the tokens that it holds.

        Raises:
            UserError: The engine cannot hold the prompt. No sequence is started then.
        """
        keys = self.keys(prompt)
        found = self._found(keys)
        self._use(keys[:found])
        sequence = self._engine.fork(self.kept[keys[found - 1]]) if found else start()
        self.reused_tokens += found * self._chunk
        try:
            for number in range(found, len(keys)):
                prefill(sequence, prompt[number * self._chunk : (number + 1) * self._chunk])
                self._keep(keys[: number + 1], sequence)
        except UserError:
            self._engine.release([sequence])
            raise
        return sequence, len(keys) * self._chunk

    def longest(self, prompt: Sequence[int]) -> int | None:
        """Return the sequence of the longest kept beginning of a prompt; None where none is kept."""
        keys = self.keys(prompt)
        found = self._found(keys)
        return self.kept[keys[found - 1]] if found else None

    def _found(self, keys: Sequence[str]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.kept), len(keys))

    def _keep(self, keys: Sequence[str], sequence: int) -> None:
        """Keep what a sequence holds now under the last key, if the beginnings that it continues are kept."""
        if len(keys) > 1 and keys[-2] not in self.kept:
            return
        self.kept[keys[-1]] = self._engine.fork(sequence)
        self._use(keys[:-1])
        while len(self.kept) > self._most:
            self.evict()

    def evict(self) -> bool:
        """Let the least recently used beginning go; return whether there was one."""
        if not self.kept:
            return False
        self._engine.release([self.kept.pop(next(iter(self.kept)))])
        return True

    def _use(self, keys: Sequence[str]) -> None:
        """Make beginnings the most recently used, the shortest last, so that none outlives those that it continues."""
        for key in reversed(keys):
            self.kept[key] = self.kept.pop(key)
