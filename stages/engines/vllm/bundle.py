"""The bundle on disk, and the check that it is still what was built."""

from pathlib import Path
from typing import Any

from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.scales import KVScales
from stages.engines.bundle import BuiltFor, BundleRecord, open_record, read_policy

BACKEND = "vllm"
LIBRARY = "vLLM"
CHECKPOINT = "checkpoint"
"""Folder of the checkpoint that is served."""
ENGINE_ARGS_FILE = "engine_args.yaml"
"""For `vllm serve BUNDLE/checkpoint --config BUNDLE/engine_args.yaml`."""


class VllmBundle(BundleRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    platform: str
    """cpu or cuda."""
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    max_batch: int
    engine_args: dict[str, Any]
    """Engine arguments of serving, as vLLM was given them."""
    resolved: dict[str, Any]
    """What vLLM makes of them for this model, as far as it is looked at."""
    kv_scales_in_checkpoint: bool

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def open_bundle(directory: Path) -> tuple[VllmBundle, KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle = open_record(directory, VllmBundle, BACKEND)
    policy, scales = read_policy(directory, bundle.shape)
    return bundle, policy, scales
