"""llama.cpp, on a GGUF of the same weights in float16."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from benchmarks.peers_cpu.peer import Logits, Peer, Setting
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.core.records import no_progress
from stages.gguf.write import write_gguf


class LlamaCpp(Peer):
    """llama.cpp, through the C interface of llama-cpp-python: it returns all logits, and takes a batch in one step."""

    title = "llama.cpp"
    modules = ("llama_cpp", "gguf")
    distributions = ("llama-cpp-python", "gguf")
    install = "--no-deps llama-cpp-python==0.3.36 diskcache gguf"
    formats: ClassVar = {"f16": "float", "q8_0": "8 bit", "q4_0": "4 bit"}
    weights = "float16 (a GGUF made of the checkpoint)"
    chunk = 2048
    """Tokens of one call in a prefill, llama.cpp's default."""

    def __init__(self, kv: str, setting: Setting) -> None:
        import llama_cpp

        super().__init__(kv, setting)
        self.library = llama_cpp
        llama_cpp.llama_backend_init()
        path = str(setting.models / "model-f16.gguf").encode()
        model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = setting.batch * setting.capacity, setting.batch
        options.n_batch, options.n_ubatch = self.chunk, 512
        options.n_threads = options.n_threads_batch = setting.threads
        options.type_k = options.type_v = getattr(llama_cpp, f"GGML_TYPE_{kv.upper()}")
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED  # quantized values need it
        options.kv_unified = False  # each sequence in memory of its own, also the copies
        self.context = llama_cpp.llama_init_from_model(model, options)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.length = 0

    @classmethod
    def prepare(cls, setting: Setting) -> None:
        target = setting.models / "model-f16.gguf"
        if not target.exists():
            write_gguf(inspect_checkpoint(setting.checkpoint), target.with_suffix(".part"), no_progress)
            target.with_suffix(".part").rename(target)

    def _decode(self, tokens: Sequence[int], rows: Sequence[tuple[int, int]]) -> Logits:
        """Run tokens at (position, sequence) each; returns the logits of the last token of each sequence, in their order."""
        library, last = self.library, {sequence: index for index, (_, sequence) in enumerate(rows)}
        batch = library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, (token, (position, sequence)) in enumerate(zip(tokens, rows, strict=True)):
                batch.token[index], batch.pos[index] = int(token), position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = last[sequence] == index
            if code := library.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            pointers = [library.llama_get_logits_ith(self.context, index) for index in last.values()]
            return np.stack([np.ctypeslib.as_array(pointer, (self.vocabulary,)) for pointer in pointers])
        finally:
            library.llama_batch_free(batch)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        for begin in range(0, len(tokens), self.chunk):
            chunk = tokens[begin : begin + self.chunk]
            logits = self._decode(chunk, [(begin + index, 0) for index in range(len(chunk))])
        self.length = len(tokens)
        return np.asarray(logits[0])

    def replicate(self, batch: int) -> None:
        for sequence in range(1, batch):
            self.library.llama_memory_seq_cp(self.library.llama_get_memory(self.context), 0, sequence, -1, -1)

    def step(self, tokens: Sequence[int]) -> Logits:
        logits = self._decode(tokens, [(self.length, sequence) for sequence in range(len(tokens))])
        self.length += 1
        return logits

    def bytes_per_token(self) -> float:
        return float(self.library.llama_state_seq_get_size(self.context, 0) / self.length)
