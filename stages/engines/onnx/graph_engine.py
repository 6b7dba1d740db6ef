"""The base class of engines that run the prefill and decode graphs over a paged pool."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.kv import KVScales
from pipeline.core.records import MemoryReport
from stages.engines.base import ChunkedEngine, Logits, Mode, check_tokens, not_finite
from stages.engines.paged.layout import layer_sides
from stages.engines.paged.pool import PagedPool


class PagedEngine(ChunkedEngine):
    """pipeline.core.records.Engine, but for the execution of a graph, which is the subclass's."""

    max_sequences: int | None = None
    """See pipeline.core.records.SharingEngine."""

    def __init__(self, vocab_size: int, scales: KVScales, pool: PagedPool, *, prefill_chunk: int) -> None:
        super().__init__(pool.policy, pool.shape, vocab_size, prefill_chunk)
        self.pool = pool
        self._constants: dict[str, Any] = {}
        """Static scales and zeros as attention reads them, float32 arrays by graph input."""
        self._faults: dict[str, float] = {}
        """Factors of `corrupt_key_scale` on what is written to arrays of the pool, by array."""
        for layer in range(self.shape.layers):
            for stored in layer_sides(self.policy, self.shape, layer).values():
                for name, values in stored.constant_values(scales, layer).items():
                    self._constants[f"{name}.{layer}"] = self._constant(values)

    def _constant(self, values: npt.NDArray[np.float32]) -> Any:
        """An array as the graphs read it; a subclass on another device returns its tensor. It is multiplied in place."""
        return values

    @abstractmethod
    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> Logits:
        """Append tokens `ids` (B, S) to sequences with pages for them; return the logits (B, V) of each one's last token."""

    def _start(self) -> int:
        return self.pool.start()

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        self.pool.reserve([sequence], len(prompt))
        for chunk in self._chunks(prompt):
            logits = self._run("prefill", [sequence], np.array([chunk], np.int64))
        last: Logits = logits[0]
        return last

    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        self.pool.reserve(sequences, 1)
        return self._run("decode", sequences, np.array(tokens, np.int64)[:, None])

    def _release(self, sequence: int) -> None:
        self.pool.release(sequence)

    def fork(self, sequence: int) -> int:
        """Start a sequence with the same tokens, which shares the full pages of the first, and return its handle."""
        return self.pool.fork(sequence)

    def extend(self, sequence: int, tokens: Sequence[int]) -> Logits:
        """Append tokens of a prompt to a live sequence.

        They attend to each other exactly and to what the sequence holds through the quantized cache, as a chunk of a prefill
        does that ended where this sequence ends.

        Returns:
            Logits (vocab_size,) of the last token.

        Raises:
            UserError: The tokens are none, or outside the vocabulary, or the engine cannot hold them.
        """
        check_tokens(tokens, self.vocab_size)
        return self._prefill(sequence, tokens)

    def memory(self) -> MemoryReport:
        return self.pool.memory(sum(values.nbytes for values in self._constants.values()))

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the scales that decoding reads keys with, of stored and of later tokens; the codes stay right."""
        for layer in range(self.shape.layers):
            for side, stored in layer_sides(self.policy, self.shape, layer).items():
                for name in stored.fault_targets if side.is_key else ():
                    target = f"{name}.{layer}"
                    if target in self._constants:
                        self._constants[target] *= factor
                    else:
                        self.pool.scale_array(target, factor)
                        self._faults[target] = self._faults.get(target, 1.0) * factor

    def _refuse(self, sums: npt.NDArray[np.floating], handles: Sequence[int]) -> None:
        """Raise UserError for the first key or value that is not finite; `sums` are the graph's output NOT_FINITE.

        The lowest layer comes first: what is not finite there makes the layers above not finite either.
        """
        head, token, row = (int(i) for i in min((h, s, b) for b, h, s, _ in np.argwhere(sums != 0).tolist()))
        layer, side = divmod(head // self.shape.kv_heads, 2)
        handle = handles[row]
        raise not_finite(("key", "value")[side], layer, self.pool.length(handle) + token, f"sequence {handle}")
