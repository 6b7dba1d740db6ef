"""Engine arguments."""

from types import SimpleNamespace
from typing import Any

import vllm


class EngineArgs:
    def __init__(self, model: str, **given: Any) -> None:
        if vllm.MODE == "refused arguments":
            raise ValueError("The number of heads must be divisible by the tensor parallel size")
        self.model, self.given = model, dict(given)
        if vllm.MODE == "rewritten arguments":
            self.given["block_size"] = 128

    def create_engine_config(self) -> Any:
        given = self.given
        return SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=f"torch.{given['dtype']}",
                max_model_len=given["max_model_len"],
                trust_remote_code=given["trust_remote_code"],
            ),
            cache_config=SimpleNamespace(
                cache_dtype=given["kv_cache_dtype"],
                block_size=given["block_size"],
                kv_cache_dtype_skip_layers=given.get("kv_cache_dtype_skip_layers", []),
                enable_prefix_caching=given["enable_prefix_caching"],
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=given["max_num_seqs"],
                max_num_batched_tokens=given["max_num_batched_tokens"],
                enable_chunked_prefill=given["enable_chunked_prefill"],
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=given["tensor_parallel_size"]),
        )
