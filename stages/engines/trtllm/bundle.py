"""The bundle of both targets on disk, and the check that it is still what was built and runs where it is loaded."""

from pathlib import Path
from typing import Any, Literal

from pipeline.core.kv import KVPolicy, KVScales, KVShape
from stages.engines.bundle import BuiltFor, BundleRecord, open_record, read_policy

BACKEND = "trtllm"
LIBRARY = "TensorRT-LLM"
ENGINE = "engine"
"""target=engine: folder with config.json and rank*.engine."""
CHECKPOINT = "checkpoint"
"""What was built or is served; the canary's engine is made of it."""
LLM_ARGS_FILE = "llm_args.yaml"
"""target=pytorch: for `trtllm-serve BUNDLE/checkpoint --config BUNDLE/llm_args.yaml`."""


class TrtllmBundle(BundleRecord):
    """`bundle.json`, the same for both targets."""

    target: Literal["engine", "pytorch"]
    built_for: BuiltFor
    gpus: list[str]
    """Name and driver of the GPUs of its ranks, as far as they were there when it was built."""
    tensor_parallel_size: int
    max_input_len: int
    max_seq_len: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    asked: dict[str, Any]
    """Settings in TensorRT-LLM's own words, by dotted key."""
    evaluated_with: dict[str, Any]
    """LLM arguments of an evaluation: those of serving, but for block reuse, speculation, and what returns logits."""
    rewritten: dict[str, Any]
    """Those that TensorRT-LLM built otherwise, as it did; each was allowed by backend.allow_rewrites."""
    cache_dtype: str
    """What the cache holds; without quantization it is the model's own type, whatever the policy's name."""
    kv_scales: list[float]
    """The scale of every layer's cache, which keys and values share: the larger of the two that were calibrated (engine), 1.0
    (pytorch, whose runtime does not read the checkpoint's)."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def open_bundle(directory: Path) -> tuple[TrtllmBundle, KVPolicy, KVScales]:
    """Read and verify a bundle; UserError names the file that is missing or not what was built."""
    bundle = open_record(directory, TrtllmBundle, BACKEND)
    policy, scales = read_policy(directory, bundle.shape)
    return bundle, policy, scales
