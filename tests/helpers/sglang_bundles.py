"""Bundles of SGLang from the tiny model."""

from pathlib import Path
from typing import Any

from shipped import SHIPPED, conf
from vllm_bundles import write_scales

from stages.engines.sglang.backend import SglangBackend
from stages.engines.sglang.config import SglangConfig
from stages.engines.sglang.engine import SglangEngine


def config_of(python: str, **changes: Any) -> SglangConfig:
    return SglangConfig.model_validate({**conf("backend", "sglang"), "python": python, "context_length": 512, **changes})


def make_sglang_bundle(checkpoint: Path, out: Path, kv: str, python: str) -> Path:
    """A bundle, as the chain builds it."""
    policy = SHIPPED[kv]
    out.mkdir(parents=True)
    scales = write_scales(out.with_suffix(".scales.json"), policy)
    SglangBackend(config_of(python)).build(checkpoint, out, policy=policy, scales=scales, progress=lambda *_: None)
    return out


def open_sglang(bundle: Path, python: str, timeout_s: int = 120) -> SglangEngine:
    return SglangEngine(bundle, config_of(python, request_timeout_s=timeout_s))
