"""The embedded engine: ONNX Runtime over a paged, quantized KV cache.

Pools stay where they are: a run binds the addresses of the numpy arrays as inputs, and what is stored of the new tokens is
then written into their pages.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.errors import UserError
from pipeline.kv import KVScales
from pipeline.records import PREFILL_CHUNK, MemoryReport
from stages.generation import check_tokens, greedy, not_finite
from stages.onnx.bundle import Bundle, open_bundle
from stages.onnx.formats import layer_sides
from stages.onnx.graph import NUMPY_FLOATS
from stages.onnx.pool import Array, PagedPool, Spans, scaled
from stages.onnx.session import GraphSession
from stages.onnx.surgery import NOT_FINITE


def load_engine(bundle: Path, *, threads: int, max_pages: int = 1 << 16, prefill_chunk: int = PREFILL_CHUNK) -> "OnnxEngine":
    """Load a bundle that build_bundle wrote.

    `max_pages` bounds the pool (it grows as needed), `prefill_chunk` the tokens of one prefill run: a longer prompt
    attends over the quantized cache of its earlier chunks. Raises UserError when a file is missing or was altered.
    """
    for name, value in (("threads", threads), ("max_pages", max_pages), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    described, policy, scales = open_bundle(bundle)
    pool = PagedPool(policy, described.model.shape, max_pages)
    return OnnxEngine(bundle, described, scales, pool, threads=threads, prefill_chunk=prefill_chunk)


class OnnxEngine:
    """pipeline.records.Engine on ONNX Runtime. Deterministic: the same calls give the same logits."""

    def __init__(
        self, directory: Path, bundle: Bundle, scales: KVScales, pool: PagedPool, *, threads: int, prefill_chunk: int
    ) -> None:
        self.policy, self.shape = pool.policy, pool.shape
        self.vocab_size = bundle.model.vocab_size
        self.pool = pool
        self._chunk = prefill_chunk
        self._float = NUMPY_FLOATS[bundle.model.compute_dtype]
        self._prefill = GraphSession(directory / "prefill.onnx", threads)
        self._decode = GraphSession(directory / "decode.onnx", threads)
        self._bound: dict[GraphSession, Spans] = {}
        """What of the pool's arrays a session's inputs are."""
        self._constants: dict[str, npt.NDArray[np.float32]] = {}
        """Static scales and zeros as attention reads them, by graph input."""
        self._faults: dict[str, float] = {}
        """What `corrupt_key_scale` multiplies arrays of the pool with."""
        for layer in range(self.shape.layers):
            for side in layer_sides(self.policy, self.shape, layer).values():
                self._constants |= {f"{name}.{layer}": values for name, values in side.parameters(scales, layer).items()}
        for session in (self._prefill, self._decode):
            for name, values in self._constants.items():
                session.bind_input(name, values)

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
                    logits[i] = self._run(self._prefill, handles[-1:], ids)[0]
        except UserError:
            self.release(handles)
            raise
        return handles, logits

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append one token to each (distinct) sequence: logits (len(sequences), vocab_size)."""
        if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
            raise ValueError(f"decode takes one token for each of distinct sequences, got {sequences} and {tokens}")
        check_tokens(tokens, self.vocab_size)
        self.pool.reserve(sequences, 1)
        return self._run(self._decode, sequences, np.array(tokens, np.int64)[:, None])

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
                        self._constants[target] *= np.float32(factor)
                    else:
                        self.pool.scale_array(target, factor)
                        self._faults[target] = self._faults.get(target, 1.0) * factor

    def _run(self, session: GraphSession, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append tokens (B, S) to sequences that have room for them: logits (B, V) of the last."""
        batch, tokens = ids.shape
        tables, spans = self.pool.view(handles)
        positions = tables["lengths"][:, None].astype(np.int64) + np.arange(tokens)
        inputs = {"input_ids": ids, "position_ids": positions, "last": np.full(batch, tokens - 1), **tables}
        for name, values in inputs.items():
            session.put(name, values)
        if self._bound.get(session) != spans:
            for name in self.pool.arrays:
                session.bind_input(name, self.pool.shown(name, spans))
            self._bound[session] = spans
        new: dict[str, Array] = {
            name: session.output(f"new_{name}", (batch, array.shape[1], tokens, array.shape[3]), array.dtype)
            for name, array in self.pool.arrays.items()
        }
        logits = session.output("logits", (batch, self.vocab_size), self._float)
        sums = session.output(NOT_FINITE, (batch, self.shape.layers * 2 * self.shape.kv_heads, tokens, 1), self._float)
        session.run()
        if sums.any():
            self._refuse(sums, handles)
        self.pool.append(handles, new | {name: scaled(new[name], factor) for name, factor in self._faults.items()})
        return logits.astype(np.float32)

    def _refuse(self, sums: npt.NDArray[np.floating], handles: Sequence[int]) -> None:
        """Name the first key or value that is not finite: of the lowest layer, since it spoils the layers above."""
        head, token, row = (int(i) for i in min((h, s, b) for b, h, s, _ in np.argwhere(sums != 0).tolist()))
        layer, side = divmod(head // self.shape.kv_heads, 2)
        handle = handles[row]
        raise not_finite(("key", "value")[side], layer, self.pool.length(handle) + token, f"sequence {handle}")
