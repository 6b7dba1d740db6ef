"""A hand-written quantized checkpoint with its two exports. Names and shapes equal ModelOpt's, whose own export is slow."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from stages.policies.scales import SCALES_FILE

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 4, 128, 4, 2, 64, 384, 1344
ALGORITHMS = {"fp16": None, "fp8": "FP8", "int8_tensor": "INT8"}


def make_exports(checkpoint: Path, folder: Path, kv: str) -> Path:
    """Write the output of stage=quantize for `kv`: checkpoint, exports and scales."""
    folder.mkdir()
    (folder / "checkpoint").symlink_to(checkpoint)
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype("<f2"))

    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    tensors = {"transformer.vocab_embedding.weight": embedding, "lm_head.weight": embedding}
    tensors["transformer.ln_f.weight"] = floats(HIDDEN)
    served = {"model.embed_tokens.weight": embedding}
    key = 1.0 if kv == "fp8" else 1.0 / 127  # components of the toy's vectors are about 0.1
    value = key / 2
    for layer in range(LAYERS):
        prefix = f"transformer.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = tensors[f"{prefix}post_layernorm.weight"] = floats(HIDDEN)
        tensors[f"{prefix}attention.qkv.weight"] = floats((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}attention.dense.weight"] = floats(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.fc.weight"], tensors[f"{prefix}mlp.gate.weight"] = floats(INNER, HIDDEN), floats(INNER, HIDDEN)
        tensors[f"{prefix}mlp.proj.weight"] = floats(HIDDEN, INNER)
        if ALGORITHMS[kv] is not None:
            for name, scale in (("k", key), ("v", value), ("kv", max(key, value))):
                tensors[f"{prefix}attention.{name}_cache_scaling_factor"] = torch.tensor([scale])
            served[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor([key])
            served[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor([value])
    config = {
        "architecture": "LlamaForCausalLM", "dtype": "float16", "logits_dtype": "float16",
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_size": HEAD_DIM,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY,
        "use_parallel_embedding": True, "embedding_sharding_dim": 0,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": ALGORITHMS[kv]},
    }  # fmt: skip
    (folder / "tensorrt_llm").mkdir()
    (folder / "tensorrt_llm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "tensorrt_llm" / "rank0.safetensors")
    (folder / "unified_hf").mkdir()
    model_config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if ALGORITHMS[kv] is not None:  # ModelOpt declares the cache format, with null weights, in two places.
        model_config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
        quantization: dict[str, object] = {"quant_algo": None, "kv_cache_quant_algo": ALGORITHMS[kv], "quantized_layers": {}}
        declared = json.dumps({"quantization": quantization})
        (folder / "unified_hf" / "hf_quant_config.json").write_text(declared, encoding="utf-8")
    (folder / "unified_hf" / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
    save_file(served, folder / "unified_hf" / "model.safetensors")
    sides = {"key": {"scale": [key]}, "value": {"scale": [value]}} if ALGORITHMS[kv] else {}
    (folder / SCALES_FILE).write_text(json.dumps({"layers": [sides] * LAYERS}), encoding="utf-8")
    return folder
