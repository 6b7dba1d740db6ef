"""What the benchmarks of engines share: the record they write, one checkpoint, its tokens, policies and bundles."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.recording import ROOT, record, say, version, write_json
from pipeline.core.kv import KVPolicy, KVScales, KVShape
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.export import export_decoder
from stages.workloads.prompts import load_tokenizer, token_ids
from stages.workloads.prose import collection

__all__ = ["record", "say", "write_json"]

CHECKPOINT = ROOT / "stages" / "tiny" / "checkpoint"
POLICIES = ("int4_g64", "fp8k_int4v", "fp8", "int8")
"""The first one's ratios are the headline: it has the peers' bits and group size."""


def quiet(*_: object) -> None:
    """No progress from stages; the benchmarks say on stderr what they are at."""


def require(*packages: str) -> None:
    """Exit with 4 unless all are installed."""
    missing = [name for name in packages if version(name) is None]
    if missing:
        say(f"{' and '.join(missing)} must be installed for this benchmark: pip install -e '.[bench]'")
        sys.exit(4)


def load_policy(name: str) -> KVPolicy:
    return KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{name}.yaml").read_text()))


def load_model(checkpoint: Path = CHECKPOINT) -> Any:
    """The checkpoint in float32, the type that the CPU engines compute in."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()


def model_shape(model: Any) -> KVShape:
    return KVShape(model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim)


def story_tokens(rows: int, length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Token ids (rows, length) of generated prose, another one in each row."""
    tokenizer, out = load_tokenizer(CHECKPOINT), np.empty((rows, length), np.int64)
    for row in range(rows):
        rng, ids = random.Random(f"{seed} {row}"), list[int]()
        while len(ids) < length:
            ids += token_ids(tokenizer, collection(rng, 20), length)
        out[row] = ids[:length]
    return out


def static_scales(policy: KVPolicy, model: Any, tokens: npt.NDArray[np.int64]) -> KVScales:
    """Scales of a policy whose static sides have one symmetric scale a layer: the largest magnitude over `tokens` (1, n).

    ModelOpt's calibration does the same over more tokens; what is timed does not depend on their value.
    """
    with torch.inference_mode():
        cache = model(torch.from_numpy(tokens), use_cache=True).past_key_values
    layers = []
    for number, layer in enumerate(cache.layers):
        found: dict[str, Any] = {}
        for side, form in policy.sides(number).items():
            if form.static:
                assert (form.granularity, form.symmetric) == ("per_tensor", True), (
                    f"{policy.name} is calibrated by ModelOpt only"
                )
                states = layer.keys if side.is_key else layer.values
                found[side] = {"scale": (states.abs().max().item() / form.code.limit,), "zero": None}
        layers.append(found)
    return KVScales.model_validate({"layers": tuple(layers)})


def make_bundle(policy: KVPolicy, scales: KVScales, work: Path) -> Path:
    """The ONNX engine bundle of the checkpoint under `policy` below the directory `work`."""
    decoder, bundle = work / "decoder", work / policy.name
    if not decoder.exists():
        decoder.mkdir(parents=True)
        export_decoder(CHECKPOINT, decoder, compute_dtype="float32", progress=quiet)
    bundle.mkdir()
    path = work / f"{policy.name}.scales.json"
    path.write_text(scales.model_dump_json())
    build_bundle(decoder, bundle, policy=policy, scales=path, progress=quiet)
    return bundle
