"""llama.cpp, through the C interface of llama-cpp-python: it returns all logits, and takes eight sequences in one step."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers_cpu.contender import CacheBytes, Contender, Logits, Setting
from benchmarks.peers_cpu.gguf_file import write_gguf

MODEL = "model-f16.gguf"

BATCH, MICRO_BATCH = 2048, 512
"""Tokens of one call and of one pass over the model in a prefill: llama.cpp's defaults."""

TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}

WARNING = 3
"""Level of llama.cpp's messages."""

_MODELS: dict[Path, Any] = {}


def _print_warnings(level: int, text: bytes, _data: Any) -> None:
    if level >= WARNING:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


_LOG = llama_cpp.llama_log_callback(_print_warnings)
"""Kept, because llama.cpp calls it as long as it runs."""


def prepare(setting: Setting) -> None:
    """Write the checkpoint as a GGUF file in float16."""
    target = setting.models / MODEL
    if not target.exists():
        part = target.with_suffix(".part")
        write_gguf(setting.checkpoint, part)
        part.rename(target)


def open_contender(kv: str, setting: Setting) -> Contender:
    """Return a contender; all of them share one model."""
    path = setting.models / MODEL
    if path not in _MODELS:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_LOG, None)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        _MODELS[path] = model
    return LlamaContender(_MODELS[path], kv, setting)


class LlamaContender(Contender):
    """A context of llama.cpp with one type of keys and values."""

    def __init__(self, model: Any, kv: str, setting: Setting) -> None:
        self.model, self.kv, self.setting = model, kv, setting
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.context: Any = None
        self.length = 0

    def _open(self) -> None:
        sequences = self.setting.batch
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = sequences * self.setting.capacity
        options.n_batch, options.n_ubatch, options.n_seq_max = BATCH, MICRO_BATCH, sequences
        options.n_threads = options.n_threads_batch = self.setting.threads
        options.type_k = options.type_v = TYPES[self.kv]
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # Each sequence in memory of its own, also the copies.
        options.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not open {sequences} x {self.setting.capacity} tokens of {self.kv}")

    def _decode(self, tokens: Sequence[int], rows: Sequence[tuple[int, int]]) -> Logits:
        """Run tokens at (position, sequence) each; returns the logits of the last token of each sequence, in their order."""
        last = {sequence: index for index, (_, sequence) in enumerate(rows)}
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, (token, (position, sequence)) in enumerate(zip(tokens, rows, strict=True)):
                batch.token[index] = int(token)
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = last[sequence] == index
            code = llama_cpp.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            pointers = [llama_cpp.llama_get_logits_ith(self.context, index) for index in last.values()]
            return np.stack([np.ctypeslib.as_array(pointer, (self.vocabulary,)) for pointer in pointers])
        finally:
            llama_cpp.llama_batch_free(batch)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        if self.context is None:
            self._open()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        for begin in range(0, len(tokens), BATCH):
            chunk = tokens[begin : begin + BATCH]
            logits = self._decode(chunk, [(begin + index, 0) for index in range(len(chunk))])
        self.length = len(tokens)
        return np.asarray(logits[0])

    def replicate(self, batch: int) -> None:
        for sequence in range(1, batch):
            llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(self.context), 0, sequence, -1, -1)

    def step(self, tokens: Sequence[int]) -> Logits:
        logits = self._decode(tokens, [(self.length, sequence) for sequence in range(len(tokens))])
        self.length += 1
        return logits

    def cache_bytes(self) -> CacheBytes:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        return CacheBytes(size / self.length, "measured: the state of the sequence, which adds 12 bytes a token of positions")

    def close(self) -> None:
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        self.context = None
