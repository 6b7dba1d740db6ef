"""Helpers for benchmarks of engines: the tiny checkpoint's model and tokens, policies, scales and ONNX bundles."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml

from benchmarks.recording import ROOT
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm, load_tokenizer
from stages.core.records import no_progress
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.export import export_decoder
from stages.policies.policy import KVPolicy
from stages.policies.scales import KVScales
from stages.quantize.scales import static_scales
from stages.workloads.generated import story
from stages.workloads.prompts import token_ids

CHECKPOINT = ROOT / "stages" / "tiny" / "checkpoint"


def load_policy(name: str) -> KVPolicy:
    """Return the policy of conf/kv/NAME.yaml."""
    return KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{name}.yaml").read_text()))


def load_model(checkpoint: Path = CHECKPOINT) -> Any:
    """Return the checkpoint's model in float32, the type that the CPU engines compute in."""
    return load_causal_lm(checkpoint, dtype=torch.float32).eval()


def story_tokens(rows: int, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return token ids (rows, length) of generated prose, with a different text per row."""
    tokenizer, out = load_tokenizer(CHECKPOINT), np.empty((rows, length), np.int64)
    for row in range(rows):
        rng, ids = random.Random(f"{seed} {row}"), list[int]()
        while len(ids) < length:
            ids += token_ids(tokenizer, "\n\n".join(story(rng) for _ in range(20)), length)
        out[row] = ids[:length]
    return out


def make_bundle(policy: KVPolicy, scales: KVScales, work: Path, checkpoint: Path = CHECKPOINT) -> Path:
    """Build the ONNX engine bundle of a checkpoint under `policy` in the directory `work`, and return its path."""
    decoder, bundle = work / "decoder", work / policy.name
    if not decoder.exists():
        decoder.mkdir(parents=True)
        export_decoder(checkpoint, decoder, compute_dtype="float32", progress=no_progress)
    bundle.mkdir()
    path = work / f"{policy.name}.scales.json"
    path.write_text(scales.model_dump_json())
    build_bundle(decoder, bundle, policy=policy, scales=path, progress=no_progress)
    return bundle


def static_scales_on(checkpoint: Path, texts: Sequence[Sequence[int]]) -> Callable[[KVPolicy], KVScales]:
    """Return a function that computes a policy's static scales as the pipeline does, calibrated on texts of token ids."""
    from stages.quantize import modelopt_adapter as adapter  # imported here because GPU benchmarks do not need it
    from stages.quantize import run

    info = inspect_checkpoint(checkpoint)
    model, layers, run_texts = run.load_model(info), info.shape.layers, run.forward_loop("cache", texts, no_progress)
    extremes = adapter.measure_extremes(model, layers, run_texts, checkpoint)
    return lambda policy: static_scales(policy, info.shape, extremes, checkpoint)
