"""Bundles of the tiny model for backends whose library runs in another interpreter, made without ModelOpt to save seconds."""

import json
from pathlib import Path
from typing import Any

from helpers.engines.trtllm_exports import KV_HEADS, LAYERS
from helpers.policies.shipped import SHIPPED, conf
from stages.core.records import no_progress
from stages.engines.backend import open_backend
from stages.engines.config import backend_configs
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE

KEY_SCALE, VALUE_SCALE = 0.04, 0.02
SMALL: dict[str, dict[str, Any]] = {
    "llamacpp": {"n_ctx": 512, "n_seq_max": 3, "n_batch": 96, "threads": 1},
    "sglang": {"context_length": 512},
    "trtllm": {"target": "engine", "max_seq_len": 512, "max_input_len": 500},
    "vllm": {
        "max_model_len": 512, "max_num_batched_tokens": 512, "kv_cache_gib": 0.05, "threads": 1
    },
}  # fmt: skip


def config_of(backend: str, python: str | None, **changes: Any) -> Any:
    """Return the shipped configuration of a backend, reduced for the tiny model."""
    return backend_configs()[backend].model_validate(
        {**conf("backend", backend), "python": python, **SMALL[backend], **changes}
    )


def write_scales(path: Path, policy: KVPolicy) -> Path:
    """Write a kv_scales.json for a policy that vLLM supports."""
    layers = []
    for layer in range(LAYERS):
        sides = {}
        for side, form in policy.sides(layer).items():
            if form.static:
                scale = 1.0 if form.scale == "uncalibrated" else KEY_SCALE if side.is_key else VALUE_SCALE
                count = KV_HEADS if form.granularity == "per_head" else 1
                sides[side.value] = {"scale": [scale * (1 + 0.5 * i) for i in range(count)]}
        layers.append(sides)
    path.write_text(json.dumps({"layers": layers}), encoding="utf-8")
    return path


def make_bundle(backend: str, source: Path, out: Path, kv: str | KVPolicy, python: str, **changes: Any) -> Path:
    """Build a bundle, as the chain does, from a checkpoint or from exports with their scales."""
    policy = SHIPPED[kv] if isinstance(kv, str) else kv
    out.mkdir(parents=True)
    scales = source / SCALES_FILE
    if not scales.is_file():
        scales = write_scales(out.with_suffix(".scales.json"), policy)
    config = config_of(backend, python, **changes)
    open_backend(config).build(source, out, policy=policy, scales=scales, progress=no_progress)
    return out


def open_engine(bundle: Path, python: str) -> Any:
    """Load the engine of a bundle made by `make_bundle`."""
    backend = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))["backend"]
    return open_backend(config_of(backend, python)).load(bundle)
