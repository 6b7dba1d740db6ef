"""What an engine over the prefill and decode graphs and a paged pool does, whatever executes the graphs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UserError
from pipeline.core.kv import KVScales
from pipeline.core.records import MemoryReport
from stages.engines.base import check_step, check_tokens, greedy, not_finite
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.formats import layer_sides
from stages.engines.onnx.functions import Mode
from stages.engines.paged.pool import PagedPool


class PagedEngine(ABC):
    """pipeline.core.records.Engine, but for the execution of a graph."""

    def __init__(self, model: ModelInfo, scales: KVScales, pool: PagedPool, *, prefill_chunk: int) -> None:
        self.policy, self.shape = pool.policy, pool.shape
        self.vocab_size = model.vocab_size
        self.pool = pool
        self._chunk = prefill_chunk
        self._constants: dict[str, Any] = {}
        """Static scales and zeros as attention reads them, float32 arrays by graph input."""
        self._faults: dict[str, float] = {}
        """What `corrupt_key_scale` multiplies arrays of the pool with."""
        for layer in range(self.shape.layers):
            for side in layer_sides(self.policy, self.shape, layer).values():
                for name, values in side.parameters(scales, layer).items():
                    self._constants[f"{name}.{layer}"] = self._constant(values)

    def _constant(self, values: npt.NDArray[np.float32]) -> Any:
        """Where the graphs read it, as something that can be multiplied in place."""
        return values

    @abstractmethod
    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append tokens (B, S) to sequences that have room for them: logits (B, V) of the last."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Start one sequence a prompt: handles, and logits (len(prompts), vocab_size) of each prompt's last token."""
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        handles: list[int] = []
        logits = np.zeros((len(prompts), self.vocab_size), np.float32)
        try:
            for i, prompt in enumerate(prompts):
                handles.append(self.pool.start())
                self.pool.reserve(handles[-1:], len(prompt))
                for first in range(0, len(prompt), self._chunk):
                    ids = np.array([prompt[first : first + self._chunk]], np.int64)
                    logits[i] = self._run("prefill", handles[-1:], ids)[0]
        except UserError:
            self.release(handles)
            raise
        return handles, logits

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append one token to each (distinct) sequence: logits (len(sequences), vocab_size)."""
        check_step(sequences, tokens, self.vocab_size)
        self.pool.reserve(sequences, 1)
        return self._run("decode", sequences, np.array(tokens, np.int64)[:, None])

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], stop_token: int | None
    ) -> list[list[int]]:
        """Greedy continuations without the stop token; a finished sequence frees its pages."""
        return greedy(self, prompts, max_new_tokens, stop_token)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, which shares the full pages of the first."""
        return self.pool.fork(sequence)

    def release(self, sequences: Sequence[int]) -> None:
        """Free the sequences' pages and exact buffers."""
        for handle in sequences:
            self.pool.release(handle)

    def memory(self) -> MemoryReport:
        return self.pool.memory(sum(values.nbytes for values in self._constants.values()))

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply what decoding reads the keys with, of stored and of later tokens; the codes stay right."""
        for layer in range(self.shape.layers):
            for side in layer_sides(self.policy, self.shape, layer).values():
                for name in side.fault_targets if side.name.endswith("key") else ():
                    target = f"{name}.{layer}"
                    if target in self._constants:
                        self._constants[target] *= factor
                    else:
                        self.pool.scale_array(target, factor)
                        self._faults[target] = self._faults.get(target, 1.0) * factor

    def _refuse(self, sums: npt.NDArray[np.floating], handles: Sequence[int]) -> None:
        """Name the first key or value that is not finite: of the lowest layer, since it spoils the layers above."""
        head, token, row = (int(i) for i in min((h, s, b) for b, h, s, _ in np.argwhere(sums != 0).tolist()))
        layer, side = divmod(head // self.shape.kv_heads, 2)
        handle = handles[row]
        raise not_finite(("key", "value")[side], layer, self.pool.length(handle) + token, f"sequence {handle}")
