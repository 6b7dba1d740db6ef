"""llama.cpp, and the GGUF file that it reads: the same weights in float16, without a tokenizer, since tokens are given."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from benchmarks.peers_cpu.peer import Logits, Peer, Setting

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names in a layer, and GGUF's."""

OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _write_gguf(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint of architecture LlamaForCausalLM.

    Matrices are float16, norms float32. Rotary embedding pairs neighbouring channels in llama.cpp and halves in Hugging Face,
    so that rows of the query and key projections are reordered.
    """
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise ValueError(f"{checkpoint} must be a LlamaForCausalLM without rope_scaling")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer: Any = gguf.GGUFWriter(out, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    tensors = {name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        values: npt.NDArray[np.float32] = tensor.float().numpy()
        if stem.endswith(("q_proj", "k_proj")):
            values = _neighbours(values, heads if stem.endswith("q_proj") else kv_heads)
        writer.add_tensor(_gguf_name(stem), values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(stem: str) -> str:
    if stem in OTHER_TENSORS:
        return f"{OTHER_TENSORS[stem]}.weight"
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_TENSORS[inner]}.weight"


def _neighbours(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows (heads * D, C) of each head from (first half, second half) to pairs of one of each."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


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
            _write_gguf(setting.checkpoint, target.with_suffix(".part"))
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
