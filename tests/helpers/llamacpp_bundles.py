"""Bundles of llama.cpp from the tiny model, without ModelOpt's seconds."""

from pathlib import Path
from typing import Any

from shipped import conf
from trtllm_exports import LAYERS

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.core.kv import KVPolicy
from pipeline.core.records import no_progress
from pipeline.core.scales import KVScales
from stages.engines.llamacpp.build import build_bundle
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.engine import LlamaCppEngine
from stages.gguf.write import write_gguf

SMALL: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 3, "n_batch": 96, "threads": 1}


def config_of(python: str | None, **changes: Any) -> LlamaCppConfig:
    return LlamaCppConfig.model_validate({**conf("backend", "llamacpp"), "python": python, **SMALL, **changes})


def make_engine(checkpoint: Path, out: Path, policy: KVPolicy, python: str, **changes: Any) -> LlamaCppEngine:
    """An engine over a bundle in `out`, as the chain builds it."""
    out.mkdir(parents=True)
    write_gguf(inspect_checkpoint(checkpoint), out.with_suffix(".gguf"), no_progress)
    scales = out.with_suffix(".json")
    scales.write_text(KVScales(layers=tuple({} for _ in range(LAYERS))).model_dump_json(), encoding="utf-8")
    config = config_of(python, **changes)
    gguf = out.with_suffix(".gguf")
    build_bundle(checkpoint, out, config, gguf=gguf, policy=policy, scales=scales, progress=no_progress)
    return LlamaCppEngine(out, config)
