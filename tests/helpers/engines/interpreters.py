"""Fake interpreters, and exports and bundles of the tiny model for backends whose library runs in another interpreter."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.policies.shipped import SHIPPED, conf
from stages.core.records import no_progress
from stages.engines.backend import open_backend
from stages.engines.config import backend_configs
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE

PACKAGES = Path(__file__).resolve().parents[2] / "contract" / "fake"


def make_interpreter(
    folder: Path, release: str = "1.2.1", mode: str = "sound", gpus: tuple[str, ...] = ("9.0",), says: str | None = None
) -> str:
    """Create an interpreter with fake libraries and return its path. `mode` selects a fault, `says` replaces all output."""
    folder.mkdir(parents=True)
    return script(
        folder / "python",
        f"export FAKE_RELEASE='{release}' FAKE_MODE='{mode}' FAKE_GPUS='{json.dumps(gpus)}'\n"
        f'export PYTHONPATH="{PACKAGES}:$PYTHONPATH" PATH="{folder}:$PATH" PYTHONDONTWRITEBYTECODE=1\n'
        + (f'exec "{sys.executable}" "$@"' if says is None else f"echo '{says}'; exec cat >/dev/null"),
    )


def script(path: Path, text: str) -> str:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


LAYERS, KV_HEADS, VOCABULARY = 4, 2, 1344
ALGORITHMS = {"fp16": None, "fp8": "FP8", "int8_tensor": "INT8"}


def make_exports(checkpoint: Path, folder: Path, kv: str, ranks: int = 1) -> Path:
    """Write the output of stage=quantize for `kv`: checkpoint, scales, and exports of the tensors that the fakes read."""
    folder.mkdir()
    (folder / "checkpoint").symlink_to(checkpoint)
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    tensors = dict[str, torch.Tensor]()
    served = {"model.embed_tokens.weight": embedding}
    key = 1.0 if kv == "fp8" else 1.0 / 127  # components of the toy's vectors are about 0.1
    value = key / 2
    for layer in range(LAYERS if ALGORITHMS[kv] is not None else 0):
        for name, scale in (("k", key), ("v", value), ("kv", max(key, value))):
            tensors[f"transformer.layers.{layer}.attention.{name}_cache_scaling_factor"] = torch.tensor([scale])
        served[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor([key])
        served[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor([value])
    config = {
        "architecture": "LlamaForCausalLM", "dtype": "float16", "logits_dtype": "float16", "vocab_size": VOCABULARY,
        "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": ALGORITHMS[kv]},
    }  # fmt: skip
    (folder / "tensorrt_llm").mkdir()
    (folder / "tensorrt_llm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for rank, part in enumerate(embedding.chunk(ranks)):
        held = tensors | {"transformer.vocab_embedding.weight": part.clone()}
        save_file(held, folder / "tensorrt_llm" / f"rank{rank}.safetensors")
    (folder / "unified_hf").mkdir()
    model_config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if ALGORITHMS[kv] is not None:  # ModelOpt declares the cache format, with null weights, in two places.
        model_config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
        quantization: dict[str, object] = {"quant_algo": None, "kv_cache_quant_algo": ALGORITHMS[kv], "quantized_layers": {}}
        declared = json.dumps({"quantization": quantization})
        (folder / "unified_hf" / "hf_quant_config.json").write_text(declared, encoding="utf-8")
    (folder / "unified_hf" / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
    save_file(served, folder / "unified_hf" / "model.safetensors")
    sides = {"key": {"scale": [key]}, "value": {"scale": [value]}} if ALGORITHMS[kv] else {}
    (folder / SCALES_FILE).write_text(json.dumps({"layers": [sides] * LAYERS}), encoding="utf-8")
    return folder


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
