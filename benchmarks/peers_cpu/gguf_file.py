"""A Llama checkpoint as a GGUF file of the same weights in float16, without a tokenizer: this benchmark speaks in tokens."""

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

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


def write_gguf(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint of architecture LlamaForCausalLM.

    Matrices are float16, norms float32. Rotary embedding pairs neighbouring channels in llama.cpp and halves in Hugging Face,
    so that rows of the query and key projections are reordered.

    Raises:
        ValueError: The checkpoint is of another architecture, or scales its positions.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise ValueError(f"{checkpoint} must be a LlamaForCausalLM without rope_scaling")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, "llama")
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
