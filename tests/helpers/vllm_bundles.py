"""Bundles of vLLM from the tiny model, without ModelOpt's seconds."""

import json
from pathlib import Path
from typing import Any

import pytest
from shipped import SHIPPED, conf
from trtllm_exports import LAYERS

from pipeline.core.kv import KVPolicy
from stages.engines.vllm.backend import VllmBackend
from stages.engines.vllm.config import VllmConfig
from stages.engines.vllm.engine import VllmEngine

KEY_SCALE, VALUE_SCALE = 0.04, 0.02
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 512, "kv_cache_gib": 0.05, "threads": 1}

KNOWN_LAYOUT = pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    reason="vLLM takes its AMX kernels on this processor, and only the layout of its `vec` kernels is known",
)


def config_of(python: str, **changes: Any) -> VllmConfig:
    return VllmConfig.model_validate({**conf("backend", "vllm"), "python": python, **SMALL, **changes})


def write_scales(path: Path, policy: KVPolicy, heads: int = 2) -> Path:
    """A kv_scales.json for any of the policies that vLLM holds."""
    layers = []
    for layer in range(LAYERS):
        sides = {}
        for side, form in policy.sides(layer).items():
            if form.static:
                scale = 1.0 if form.scale == "uncalibrated" else KEY_SCALE if side.is_key else VALUE_SCALE
                count = heads if form.granularity == "per_head" else 1
                sides[side.value] = {"scale": [scale * (1 + 0.5 * i) for i in range(count)]}
        layers.append(sides)
    path.write_text(json.dumps({"layers": layers}), encoding="utf-8")
    return path


def make_vllm_bundle(checkpoint: Path, out: Path, kv: str | KVPolicy, python: str, **changes: Any) -> Path:
    """A bundle, as the chain builds it."""
    policy = SHIPPED[kv] if isinstance(kv, str) else kv
    out.mkdir(parents=True)
    scales = write_scales(out.with_suffix(".scales.json"), policy)
    VllmBackend(config_of(python, **changes)).build(checkpoint, out, policy=policy, scales=scales, progress=lambda *_: None)
    return out


def open_vllm(bundle: Path, python: str, timeout_s: int = 300) -> VllmEngine:
    return VllmEngine(bundle, config_of(python, request_timeout_s=timeout_s))
