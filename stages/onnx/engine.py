"""The embedded engine: ONNX Runtime over a paged, quantized KV cache.

Pools stay where they are: a run binds the addresses of the numpy arrays as inputs and outputs, and the new tokens' codes
are then written into their pages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pipeline.errors import UserError
from pipeline.kv import KVScales
from pipeline.records import MemoryReport
from stages.onnx.bundle import Bundle, open_bundle
from stages.onnx.formats import SCALE_STORAGE
from stages.onnx.pool import Array, PagedPool, output_name

LOGGER_ERROR = 3
ONNX_FLOAT, ONNX_FLOAT16, ONNX_INT32, ONNX_INT64 = 1, 10, 6, 7


def load_engine(bundle: Path, *, threads: int, max_pages: int = 1 << 16, prefill_chunk: int = 1024) -> "OnnxEngine":
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
        self._logits_type = ONNX_FLOAT16 if bundle.model.compute_dtype == "float16" else ONNX_FLOAT
        self._prefill = _session(directory / "prefill.onnx", threads)
        self._decode = _session(directory / "decode.onnx", threads)
        self._read_scales: dict[str, npt.NDArray[np.float32]] = {}
        """Static scales as attention reads them, (L,) by side."""
        for side, values in (("key", scales.key), ("value", scales.value)):
            if values is not None:
                self._read_scales[side] = np.array(values, np.float32)
        self._key_fault = 1.0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Start one sequence a prompt: handles, and logits (len(prompts), vocab_size) of each prompt's last token."""
        for prompt in prompts:
            self._check_tokens(prompt)
        handles: list[int] = []
        logits = np.zeros((len(prompts), self.vocab_size), np.float32)
        try:
            for i, prompt in enumerate(prompts):
                handles.append(self.pool.start())
                self.pool.reserve(handles[-1:], len(prompt))
                for first in range(0, len(prompt), self._chunk):
                    logits[i] = self._prefill_chunk(handles[-1], prompt[first : first + self._chunk])[0]
        except UserError:
            self.release(handles)
            raise
        return handles, logits

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append one token to each (distinct) sequence: logits (len(sequences), vocab_size)."""
        if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
            raise ValueError(f"decode takes one token for each of distinct sequences, got {sequences} and {tokens}")
        self._check_tokens(tokens)
        self.pool.reserve(sequences, 1)
        ids = np.array(tokens, np.int64)[:, None]
        logits, codes = self._run(self._decode, sequences, ids)
        self.pool.append_step(sequences, codes)
        return logits

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], stop_token: int | None
    ) -> list[list[int]]:
        """Greedy continuations without the stop token; a finished sequence leaves the batch and frees its pages."""
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(prompts) or min(limits, default=1) < 1:
            raise UserError(f"max_new_tokens must be at least 1 for each of {len(prompts)} prompts, got {limits}")
        handles, logits = self.prefill(prompts)
        out: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        try:
            while active:
                self._check_finite(logits, [handles[i] for i in active])
                going = []
                for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
                    if token != stop_token:
                        out[i].append(token)
                    if token == stop_token or len(out[i]) == limits[i]:
                        self.release([handles[i]])
                    else:
                        going.append(i)
                active = going
                if active:
                    logits = self.decode([handles[i] for i in active], [out[i][-1] for i in active])
        except UserError:
            self.release([handles[i] for i in active])
            raise
        return out

    def release(self, sequences: Sequence[int]) -> None:
        """Free the sequences' pages and exact buffers."""
        for handle in sequences:
            self.pool.release(handle)

    def memory(self) -> MemoryReport:
        return self.pool.memory(sum(scales.nbytes for scales in self._read_scales.values()))

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply what decoding reads the keys with, of stored and of later tokens; the codes stay right."""
        if "key" in self._read_scales:
            self._read_scales["key"] *= np.float32(factor)
            return
        self.pool.scale_array(self._key_fault_target, factor)
        self._key_fault *= factor

    @property
    def _key_fault_target(self) -> str:
        return "key_scale_pool" if "key_scale_pool" in self.pool.arrays else "key_pool"

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise UserError("a prompt must hold at least one token, got an empty one")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise UserError(f"token ids must be in [0, {self.vocab_size}), got {min(tokens)} to {max(tokens)}")

    def _prefill_chunk(self, handle: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        logits, codes = self._run(self._prefill, [handle], np.array([tokens], np.int64))
        self.pool.append_tokens(handle, codes)
        return logits

    def _run(
        self, session: Any, handles: Sequence[int], ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], dict[str, Array]]:
        """Logits (B, V) and the new codes, (L, B, H, S, W) by the pool array that they belong to."""
        batch, length = ids.shape
        tables = self.pool.tables(handles)
        binding = session.io_binding()
        positions = tables["lengths"][:, None].astype(np.int64) + np.arange(length)
        bound: dict[str, tuple[Array, int]] = {
            "input_ids": (ids, ONNX_INT64),
            "position_ids": (positions, ONNX_INT64),
            "last": (np.full(batch, length - 1, np.int64), ONNX_INT64),
            **{name: (table, ONNX_INT32) for name, table in tables.items()},
        }
        for name, (array, kind) in bound.items():
            binding.bind_input(name, "cpu", 0, kind, array.shape, array.ctypes.data)
        codes = self._bind_cache(binding, batch, length)
        raw = np.empty((batch, self.vocab_size), np.float16 if self._logits_type == ONNX_FLOAT16 else np.float32)
        binding.bind_output("logits", "cpu", 0, self._logits_type, raw.shape, raw.ctypes.data)
        session.run_with_iobinding(binding)
        logits = raw.astype(np.float32, copy=False)
        if self._key_fault != 1.0:
            target = self._key_fault_target
            codes[target] = (codes[target].astype(np.float32) * self._key_fault).astype(np.float16)
        return logits, codes

    def _bind_cache(self, binding: Any, batch: int, length: int) -> dict[str, Array]:
        """Bind the pools, static scales and exact buffers of all layers, and fresh arrays for the new tokens' codes."""
        kinds = {f"{name}_pool": side.storage.onnx_type for name, side in self.pool.sides.items()}
        codes: dict[str, Array] = {}
        for name, array in self.pool.arrays.items():
            kind = kinds.get(name, SCALE_STORAGE.onnx_type)
            seen = (self.pool.bound(name), *array.shape[2:])
            for layer in range(self.shape.layers):
                address = array.ctypes.data + layer * array.strides[0]
                binding.bind_input(f"{name}.{layer}", "cpu", 0, kind, seen, address)
            new = np.empty((self.shape.layers, batch, self.shape.kv_heads, length, array.shape[-1]), array.dtype)
            output = output_name(name)
            for layer in range(self.shape.layers):
                address = new.ctypes.data + layer * new.strides[0]
                binding.bind_output(f"{output}.{layer}", "cpu", 0, kind, new.shape[1:], address)
            codes[name] = new
        for side, scales in self._read_scales.items():
            for layer in range(self.shape.layers):
                address = scales.ctypes.data + layer * scales.itemsize
                binding.bind_input(f"{side}_scale.{layer}", "cpu", 0, ONNX_FLOAT, (1,), address)
        return codes

    def _check_finite(self, logits: npt.NDArray[np.float32], handles: Sequence[int]) -> None:
        """Refuse to pick tokens from NaN; `prefill` and `decode` hand it on, since an evaluation has to count it."""
        broken = np.flatnonzero(~np.isfinite(logits).all(-1))
        if broken.size:
            handle = handles[int(broken[0])]
            raise UserError(
                f"logits of sequence {handle} after {self.pool.length(handle)} tokens are not finite: "
                "check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"
            )


def _session(path: Path, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOGGER_ERROR
    # Dynamic shapes change at every step: reusing a memory plan per shape would only collect plans.
    options.enable_mem_pattern = False
    # Otherwise a dequantized pool is quantized and dequantized again on its way to the gather.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
