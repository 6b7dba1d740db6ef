"""The base class of all engines that run prefill and decode graphs over a paged pool."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.core.records import MemoryReport, ServedRequest, StoredCopy
from stages.engines.base import ChunkedEngine, Mode, not_finite
from stages.engines.interface import Continuation, ForcedRequest, Logits, check_tokens
from stages.engines.paged.layout import StoredSide
from stages.engines.paged.pool import PagedPool
from stages.engines.paged.preemption import advance, limited_pool, serve_together
from stages.policies.policy import PAGE_TOKENS, Side
from stages.policies.scales import KVScales


class PagedEngine(ChunkedEngine):
    """An engine over a paged pool. A subclass executes the graphs."""

    def __init__(self, vocab_size: int, scales: KVScales, pool: PagedPool, *, prefill_chunk: int) -> None:
        super().__init__(pool.policy, pool.shape, vocab_size, prefill_chunk)
        self.pool = pool
        self._constants: dict[str, Any] = {}
        """Static scales and zeros that attention reads, float32 arrays by graph input."""
        self._faults: dict[str, float] = {}
        """Array -> factor of `corrupt_key_scale` on the numbers that are written to it."""
        for layer in range(self.shape.layers):
            for stored in StoredSide.of_layer(self.policy, self.shape, layer).values():
                for name, values in stored.constant_values(scales, layer).items():
                    self._constants[f"{name}.{layer}"] = self._constant(values)

    def _constant(self, values: npt.NDArray[np.float32]) -> Any:
        """Return an array that graphs read and `corrupt_key_scale` multiplies in place; on a GPU, a tensor."""
        return values

    @abstractmethod
    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> Logits:
        """Append tokens `ids` (B, S) to sequences with reserved pages; return the logits (B, V) of the last tokens."""

    def _start(self) -> int:
        return self.pool.start()

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        moved, logits = advance(self, live)
        rows = [row for row, request in enumerate(moved) if request.stored == len(request.tokens)]
        return [moved[row] for row in rows], logits[rows]

    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        for tokens, first in chain.from_iterable(rounds):
            self._check_forced(tokens, first)
        with limited_pool(self, pages):
            return [serve_together(self, requests, rows) for requests in rounds]

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
        """Append tokens of a prompt to a live sequence.

        The tokens attend to each other exactly, and to the sequence's earlier tokens through the quantized cache, like the next
        chunk of a prefill.

        Returns:
            Logits (vocab_size,) of the last token.

        Raises:
            UserError: `tokens` is empty, has a token outside the vocabulary, or does not fit into the engine.
        """
        check_tokens(tokens, self.vocab_size)
        return self._prefill(sequence, tokens)

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        """Return a sequence's stored codes by layer, with the static scales that attention uses."""
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
                None if static_scale is None else self._host(static_scale)[0],
                None if static_zero is None else self._host(static_zero)[0],
                () if side.in_window else evicted,
            )

        return [{side: copy(side, layer) for side in self.policy.sides(layer)} for layer in range(self.shape.layers)]

    def _host(self, constant: Any) -> npt.NDArray[np.float32]:
        """Return a numpy copy of a result of `_constant`."""
        return np.array(constant)

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

    def _refuse(self, sums: npt.NDArray[np.floating], handles: Sequence[int]) -> None:
        """Raise UserError for the first key or value that is not finite; `sums` are the graph's output NOT_FINITE.

        The lowest layer is reported, because its infinite or NaN values spread to all higher layers.
        """
        head, token, row = (int(i) for i in min((h, s, b) for b, h, s, _ in np.argwhere(sums != 0).tolist()))
        layer, side = divmod(head // self.shape.kv_heads, 2)
        handle = handles[row]
        raise not_finite(("key", "value")[side], layer, self.pool.length(handle) + token, f"sequence {handle}")
