"""The PyTorch runtime: a checkpoint with LLM arguments."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tensorrt_llm.facts import MODE, PYTORCH
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.llmapi.llm_utils import ModelLoader
from tensorrt_llm.toy import Runtime, Toy


class LLM(Runtime):
    def __init__(self, model: str, **arguments: Any) -> None:
        from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttention

        super().__init__()
        parsed = TorchLlmArgs(model=model, **arguments)
        ModelLoader(parsed)._update_from_hf_quant_config()
        tensors = load_file(Path(model, "model.safetensors"))
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        attention, *_ = [TrtllmAttention(layer) for layer in range(config["num_hidden_layers"])]
        algorithm = parsed.quant_config.kv_cache_quant_algo
        to_codes, from_codes = float(attention.kv_scale_orig_quant[0]), float(attention.kv_scale_quant_orig[0])
        cache = {
            "enable_block_reuse": PYTORCH["llm_args"]["kv_cache_config.enable_block_reuse"]["default"],
            **arguments["kv_cache_config"],
        }
        self.toy = Toy(
            np.float32(tensors["model.embed_tokens.weight"]), algorithm, to_codes, from_codes,
            prompts_read=cache["enable_block_reuse"] and PYTORCH["block_reuse"]["prompts_read_the_cache"],
            chunks=2 if arguments.get("enable_chunked_prefill", MODE == "chunks by default") or MODE == "chunks" else 1,
        )  # fmt: skip
