"""The bundle of both targets on disk, and the check that it is still what was built."""

from pathlib import Path
from typing import Any, Literal

from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.scales import KVScales
from stages.engines.bundle import BuiltFor, BundleRecord, open_record, read_policy

BACKEND = "trtllm"
LIBRARY = "TensorRT-LLM"
ENGINE = "engine"
"""target=engine: folder with config.json and rank*.engine."""
CHECKPOINT = "checkpoint"
"""Folder of the checkpoint that was built or is served; the canary's engine is built from it, too."""
LLM_ARGS_FILE = "llm_args.yaml"
"""target=pytorch: for `trtllm-serve BUNDLE/checkpoint --config BUNDLE/llm_args.yaml`."""


class TrtllmBundle(BundleRecord):
    """`bundle.json`, the same for both targets."""

    target: Literal["engine", "pytorch"]
    built_for: BuiltFor
    gpus: list[str]
    """Name and driver of its ranks' GPUs, those that the building machine had."""
    tensor_parallel_size: int
    max_input_len: int
    max_seq_len: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    asked: dict[str, Any]
    """The settings that TensorRT-LLM was given, by its own dotted keys."""
    evaluated_with: dict[str, Any]
    """LLM arguments of an evaluation: those of serving, except for block reuse, speculation, and what returns logits."""
    rewritten: dict[str, Any]
    """The values of settings that TensorRT-LLM built otherwise; backend.allow_rewrites allowed each of them."""
    cache_dtype: str
    """Type of the cache's codes; without quantization it is the model's type, whatever the policy's name."""
    kv_scales: list[float]
    """The scale of every layer's cache, which keys and values share: the larger of the two that were calibrated (engine), or
    1.0 (pytorch, whose runtime does not read the checkpoint's scales)."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def open_bundle(directory: Path) -> tuple[TrtllmBundle, KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle = open_record(directory, TrtllmBundle, BACKEND)
    policy, scales = read_policy(directory, bundle.shape)
    return bundle, policy, scales
