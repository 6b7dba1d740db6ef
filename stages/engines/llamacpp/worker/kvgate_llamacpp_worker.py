"""Runs in llama.cpp's interpreter and answers the requests of `kvgate_channel`.

Needs only llama-cpp-python and its dependency numpy. Checked against 0.3.36, which contains llama.cpp of October 2026.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import kvgate_channel
import numpy as np

BLOCK_BYTES = {1: 2, 2: 18, 8: 34}
"""ggml_type (f16, q4_0, q8_0) -> bytes per block. A block begins with a float16: the number itself (f16), or the scale."""


class State:
    """Views of the bytes of `llama_state_seq_get_data` (src/llama-kv-cache.cpp). Writing to a view changes the bytes."""

    def __init__(self, state: Any) -> None:
        self.bytes, self._place = state, 8  # skips a magic number and the sequence
        self.kinds: list[int] = []
        """The ggml_type per part."""
        self.parts: list[Any] = []
        """Keys of every layer, then values of every layer, each (tokens, bytes per token)."""
        self.tokens = 0
        for _ in range(self._number("u4")):
            cells = self._number("u4")
            if cells:
                self._stream(cells)
        if self._place != len(self.bytes):
            raise RuntimeError(f"the state has {len(self.bytes)} bytes, but only {self._place} were read")

    def _stream(self, cells: int) -> None:
        self.tokens = cells
        positions = []
        for _ in range(cells):
            positions.append(self._number("i4"))
            sequences = self._number("u4")
            self._place += 4 * sequences
        if positions != list(range(cells)):
            raise RuntimeError(f"the tokens of the state are not in order: positions {positions[:8]}...")
        transposed, layers = self._number("u4"), self._number("u4")
        for part in range(2 * layers):
            self.kinds.append(self._number("i4"))
            is_transposed = transposed and part >= layers
            width = self._number("u4") * self._number("u4") if is_transposed else self._number("u8")
            view = self.bytes[self._place : self._place + cells * width]
            self.parts.append(view.view("<u2").reshape(-1, cells).T if is_transposed else view.reshape(cells, width))
            self._place += cells * width

    def _number(self, kind: str) -> int:
        width = int(kind[1:])
        number = int(self.bytes[self._place : self._place + width].view("<" + kind)[0])
        self._place += width
        return number

    def write(self, path: Path) -> None:
        """Write the stored keys, then values, layer by layer; tokens are consecutive."""
        layers = len(self.parts) // 2
        with path.open("wb") as stream:
            for layer in range(layers):
                for part in self.parts[layer::layers]:
                    stream.write(np.ascontiguousarray(part).tobytes())

    def multiply_keys(self, factor: float, first: int) -> int:
        """Multiply the keys from token `first` on by `factor`; return the number of tokens in the state."""
        for kind, part in list(zip(self.kinds, self.parts, strict=True))[: len(self.parts) // 2]:
            chosen = part[first:]
            blocks = np.ascontiguousarray(chosen).reshape(len(chosen), -1, BLOCK_BYTES[kind])
            numbers = np.ascontiguousarray(blocks[..., :2]).view("<f2")
            blocks[..., :2] = (numbers * np.float16(factor)).view(np.uint8)
            part[first:] = blocks.reshape(chosen.shape)
        return self.tokens


Row = tuple[int, int, int, bool]
"""Token, position, sequence, and whether its logits are returned."""
ERROR = 4
"""The ggml_log_level of errors."""
DECODED_TOGETHER = 32
"""Maximum tokens per sequence with logits in one batch. With an f16 cache, attention of 64 or more tokens uses another
algorithm than a decode step (GGML_FA_TILE_Q)."""


def describe() -> dict[str, Any]:
    """Return the installed release and the ggml types that it supports, under llama.cpp's names."""
    import llama_cpp

    types = [name.removeprefix("GGML_TYPE_").lower() for name in dir(llama_cpp) if name.startswith("GGML_TYPE_")]
    python = ".".join(map(str, sys.version_info[:3]))
    return {"release": llama_cpp.__version__, "python": python, "devices": [], "types": types}


class LlamaCppModel:
    """A loaded model and a context with memory for several sequences."""

    def __init__(self, model: str, context: dict[str, Any], types: dict[str, str], threads: int | None) -> None:
        import llama_cpp

        self.operations: kvgate_channel.Operations = {"run": self.run, "load": self.load}
        self.library: Any = llama_cpp
        self.errors: list[str] = []
        self.listener = llama_cpp.llama_log_callback(
            self._collect_error
        )  # keeps the callback alive: llama.cpp stores only its address
        llama_cpp.llama_log_set(self.listener, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        self._require(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        settings = llama_cpp.llama_context_default_params()
        self.sequences, self.batch = context["n_seq_max"], context["n_batch"]
        settings.n_ctx, settings.n_seq_max = context["n_ctx"] * self.sequences, self.sequences
        settings.n_batch = settings.n_ubatch = self.batch
        settings.n_outputs_max = settings.n_outputs_max_per_seq = self.batch
        settings.n_threads = settings.n_threads_batch = threads or len(os.sched_getaffinity(0))
        settings.type_k, settings.type_v = (getattr(llama_cpp, f"GGML_TYPE_{types[side].upper()}") for side in ("key", "value"))
        settings.flash_attn_type = 1  # llama.cpp quantizes values only with flash attention
        settings.offload_kqv = settings.op_offload = settings.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self._require(self.context)

    def _collect_error(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            self.errors.append(text.decode(errors="replace").strip())
        sys.stderr.write(text.decode(errors="replace") if level == ERROR else "")

    def _require(self, pointer: Any) -> None:
        if not pointer:
            raise RuntimeError("; ".join(self.errors) or "llama.cpp gives no reason")

    def run(self, requests: list[dict[str, Any]], folder: str, key_fault: float, show: bool = False) -> dict[str, Any]:
        """Answer `run` of `kvgate_channel`. With `show`, write each request's cached bytes to the file `stored`.

        `key_fault` multiplies every stored key once, before the next token is decoded; 1.0 plants no fault.
        """
        answers = []
        for begin in range(0, len(requests), self.sequences):
            group = requests[begin : begin + self.sequences]
            self._clear()
            generated, rows = self._answer(group, key_fault)
            for i, request in enumerate(group):
                path = Path(folder, f"logits-{begin + i}")
                returned = np.stack([rows[i][step] for step in range(request["skip"], request["tokens"])])
                returned.tofile(path)
                stored = Path(folder, f"stored-{begin + i}") if show else ""
                if show:
                    self._state(i).write(Path(stored))
                answers.append(
                    {"tokens": generated[i], "logits": str(path), "shape": list(returned.shape), "stored": str(stored)}
                )
        return {"answers": answers}

    def _answer(self, group: list[dict[str, Any]], key_fault: float) -> tuple[list[list[int]], list[dict[int, Any]]]:
        """Return each request's tokens, and its logits by step. Known tokens are decoded in batches unless there is a fault."""
        generated: list[list[int]] = [[] for _ in group]
        rows: list[dict[int, Any]] = [{} for _ in group]
        pending = []
        for i, request in enumerate(group):
            if key_fault == 1.0:
                generated[i] = request["forced"][: request["tokens"]]
            pending.append([*request["prompt"], *generated[i][: request["tokens"] - 1]])
        firsts = [len(request["prompt"]) - 1 for request in group]
        self._decode([(pending[i][at], at, i, False) for i, first in enumerate(firsts) for at in range(first)])
        steps = [range(first, len(pending[i])) for i, first in enumerate(firsts)]
        for begin in range(0, max(map(len, steps)), DECODED_TOGETHER):
            parts = [step[begin : begin + DECODED_TOGETHER] for step in steps]
            fed = [(pending[i][at], at, i, True) for i, part in enumerate(parts) for at in part]
            for (_, at, i, _), row in zip(fed, self._decode(fed), strict=True):
                rows[i][at - firsts[i]] = row
        corrupted = [0 for _ in group]
        while True:
            active = []
            for i, request in enumerate(group):
                if len(generated[i]) < request["tokens"]:
                    step, forced = len(generated[i]), request["forced"]
                    generated[i].append(forced[step] if step < len(forced) else int(rows[i][step].argmax()))
                    if len(generated[i]) < request["tokens"]:
                        active.append(i)
            if not active:
                return generated, rows
            if key_fault != 1.0:
                for i in active:
                    corrupted[i] = self._corrupt(i, key_fault, corrupted[i])
            fed = [(generated[i][-1], len(group[i]["prompt"]) + len(generated[i]) - 1, i, True) for i in active]
            for i, row in zip(active, self._decode(fed), strict=True):
                rows[i][len(generated[i])] = row

    def load(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return first-token times, measured one prompt at a time, and step times with all prompts decoding together."""
        if len(prompts) > self.sequences:
            raise RuntimeError(f"{len(prompts)} prompts, but memory for only {self.sequences} sequences")
        self._clear()
        first, steps, last = [], [], []
        for i, prompt in enumerate(prompts):
            began = time.perf_counter()
            rows = self._decode([(token, at, i, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            last.append(int(rows[-1].argmax()))
            first.append((time.perf_counter() - began) * 1e3)
        for step in range(tokens - 1):
            began = time.perf_counter()
            rows = self._decode([(last[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)])
            last = [int(row.argmax()) for row in rows]
            steps.append((time.perf_counter() - began) * 1e3)
        return {"first_token_ms": first, "step_ms": steps}

    def _clear(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def _decode(self, fed: list[Row]) -> list[Any]:
        """Decode tokens in batches of at most `n_batch`; return the logits (V) of the rows that request logits."""
        library, rows = self.library, []
        for part in (fed[begin : begin + self.batch] for begin in range(0, len(fed), self.batch)):
            batch = library.llama_batch_init(len(part), 0, 1)
            try:
                batch.n_tokens = len(part)
                for index, (token, position, sequence, needs_logits) in enumerate(part):
                    batch.token[index], batch.pos[index], batch.logits[index] = token, position, needs_logits
                    batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                code = library.llama_decode(self.context, batch)
                if code:
                    raise RuntimeError(f"llama_decode returned {code}; {'; '.join(self.errors[-1:])}")
                for index, row in enumerate(part):
                    if row[3]:
                        pointer = library.llama_get_logits_ith(self.context, index)
                        rows.append(np.ctypeslib.as_array(pointer, (self.vocabulary,)).copy())
            finally:
                library.llama_batch_free(batch)
        return rows

    def _state(self, sequence: int) -> Any:
        size = self.library.llama_state_seq_get_size(self.context, sequence)
        state = np.zeros(size, np.uint8)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if self.library.llama_state_seq_get_data(self.context, pointer, size, sequence) != size:
            raise RuntimeError(f"the state of sequence {sequence} does not have the reported size of {size} bytes")
        return State(state)

    def _corrupt(self, sequence: int, factor: float, first: int) -> int:
        """Multiply a sequence's keys from token `first` on by `factor`; return its number of tokens."""
        state = self._state(sequence)
        tokens = int(state.multiply_keys(factor, first))
        pointer = state.bytes.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if not self.library.llama_state_seq_set_data(self.context, pointer, state.bytes.nbytes, sequence):
            raise RuntimeError("llama.cpp refuses the changed state")
        return tokens


if __name__ == "__main__":
    kvgate_channel.serve({"describe": describe}, LlamaCppModel)
