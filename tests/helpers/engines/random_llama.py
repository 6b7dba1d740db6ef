"""A tiny random Llama, its decoder skeleton, KV policies that cover all formats, and the reference engine for comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers.policies import shipped
from helpers.shared import once
from helpers.stride import STRIDE
from stages.checkpoints.description import inspect_checkpoint
from stages.core.records import PREFILL_CHUNK, no_progress
from stages.engines.interface import Engine
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.config import ComputeDType
from stages.engines.onnx.engine import MAX_PAGES, OnnxEngine, load_engine
from stages.engines.onnx.export import export_decoder
from stages.engines.reference.build import build_bundle as build_reference_bundle
from stages.engines.reference.engine import TorchEngine
from stages.policies.formats import Format, Granularity, ScaleSource
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy, KVShape, LayerOverride, Window
from stages.policies.scales import KVScales, SideScales

AMAX = 3.0
"""Largest magnitude that the tests' static scales cover. Like after a real calibration, some keys and values exceed it."""

LAYERS = 2

STEPS = 4
"""Number of tokens that `forced` decodes after a prompt."""


def random_texts(lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens of prompts of the given lengths, with STEPS more tokens to decode."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length + STEPS).tolist() for length in lengths]


def fmt(dtype: str, granularity: Granularity = "none", scale: ScaleSource = "dynamic", **options: Any) -> Format:
    static = granularity in ("per_tensor", "per_head", "per_channel")
    source: ScaleSource = "none" if granularity == "none" else "calibrated" if static else scale
    return Format(dtype=dtype, granularity=granularity, scale=source, **options)


FP16, BF16 = FP16_POLICY.key, fmt("bf16")
FP8 = fmt("fp8_e4m3", "per_tensor")
INT8_CHANNEL_ASYM = fmt("int8", "per_channel", symmetric=False)
INT4 = fmt("int4", "per_token")
INT4_TENSOR_ASYM = fmt("int4", "per_tensor", symmetric=False)
INT4_G32_ASYM_HADAMARD = fmt("int4", "per_group", group_size=32, symmetric=False, rotation="hadamard")


def int4_groups(size: int, **options: Any) -> Format:
    return fmt("int4", "per_group", group_size=size, **options)


def conf_policy(name: str) -> KVPolicy:
    """Return a policy of conf/kv, adapted to this model's two layers.

    Overrides that name layers of the four-layer tiny model move to the last layer.
    """
    policy = shipped.SHIPPED[name]
    moved = tuple(override.model_copy(update={"layers": (LAYERS - 1,)}) for override in policy.overrides)
    return policy.model_copy(update={"overrides": moved})


SHIPPED = [
    policy
    for policy in map(conf_policy, shipped.SHIPPED)
    if policy.name != "int4_g128" and not any(form.code.reference_only for _, form in policy.formats)
]
"""Every shipped policy that fits heads of 64 channels and that ONNX graphs support."""

COMBINED = [
    KVPolicy(name="e5m2_calibrated", key=fmt("fp8_e5m2", "per_tensor"), value=fmt("fp8_e5m2", "per_head")),
    KVPolicy(name="int8_channel_asym", key=INT8_CHANNEL_ASYM, value=INT8_CHANNEL_ASYM),
    KVPolicy(name="int4_tensor_asym", key=INT4_TENSOR_ASYM, value=INT4_TENSOR_ASYM),
    KVPolicy(name="int4_g32_asym_hadamard", key=INT4_G32_ASYM_HADAMARD, value=INT4_G32_ASYM_HADAMARD),
    KVPolicy(
        name="int8_g16_int4_g16_asym",
        key=fmt("int8", "per_group", group_size=16),
        value=int4_groups(16, symmetric=False),
    ),
    KVPolicy(name="static_hadamard", key=fmt("fp8_e4m3", "per_head", rotation="hadamard"),
             value=fmt("int8", "per_channel", symmetric=False, rotation="hadamard")),
    KVPolicy(name="sinks_over_a_page", key=INT4, value=int4_groups(32), sink_tokens=66),
    KVPolicy(name="recent", key=FP8, value=FP8, recent_tokens=3),
    KVPolicy(name="window_of_keys_and_values", key=INT4, value=INT4_TENSOR_ASYM,
             window=Window(tokens=64, key=FP8, value=INT8_CHANNEL_ASYM)),
    KVPolicy(name="window_of_keys", key=INT4_G32_ASYM_HADAMARD, value=INT4, window=Window(tokens=128, key=FP16)),
    KVPolicy(name="ages", key=FP8, value=int4_groups(64), sink_tokens=4, recent_tokens=70,
             window=Window(tokens=64, value=INT4_G32_ASYM_HADAMARD)),
    KVPolicy(name="overridden_window", key=INT4, value=INT4, window=Window(tokens=64, key=BF16, value=FP8),
             overrides=(LayerOverride(layers=(0,), key=fmt("fp8_e5m2", "per_head")),
                        LayerOverride(layers=(1,), key=FP16, value=fmt("int8", "per_token", symmetric=False)))),
    KVPolicy(name="sliding", key=FP16, value=FP16, eviction=Eviction(window_tokens=64)),
    KVPolicy(name="streaming", key=FP8, value=int4_groups(64), eviction=Eviction(window_tokens=128, sink_tokens=5)),
    KVPolicy(name="evicted_ages", key=INT4_G32_ASYM_HADAMARD, value=INT4, sink_tokens=4, recent_tokens=32,
             window=Window(tokens=64, value=FP8), eviction=Eviction(window_tokens=64, sink_tokens=4)),
]  # fmt: skip

EVERY_POLICY = [*SHIPPED, *COMBINED]
BY_NAME = {policy.name: policy for policy in EVERY_POLICY}
POLICIES = [BY_NAME["fp16"], *(policy for policy in EVERY_POLICY[::STRIDE] if policy.name != "fp16")]
"""FP16 is always included: it tests the graph's own computation without quantization."""


def save_model(config: object, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")  # a checkpoint needs the file, but these tests never read it
    return path


def llama_config(head_dim: int = 64) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip


def shared_checkpoint(factory: pytest.TempPathFactory) -> Path:
    """Return the random Llama's checkpoint."""
    return once(factory, "onnx_checkpoint", lambda path: save_model(llama_config(), path))


def shared_decoder(factory: pytest.TempPathFactory, dtype: ComputeDType) -> Path:
    """Return the random Llama's decoder skeleton, which computes in `dtype`."""
    checkpoint = shared_checkpoint(factory)
    return once(factory, f"onnx_decoder_{dtype}", lambda path: make_decoder(checkpoint, path, dtype))


def tiny_decoder(factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """Return the float32 decoder skeleton of the trained model that ships with kvgate."""
    return once(factory, "tiny_decoder", lambda path: make_decoder(checkpoint, path))


def make_decoder(checkpoint: Path, path: Path, dtype: ComputeDType = "float32") -> Path:
    path.mkdir()
    export_decoder(checkpoint, path, compute_dtype=dtype, progress=no_progress)
    return path


def static_scales(policy: KVPolicy, shape: KVShape) -> KVScales:
    """Return scales that differ by layer, head and channel, and the zero points of asymmetric formats."""

    def side(form: Format, layer: int) -> SideScales:
        count = form.static_scales(shape.kv_heads, shape.head_dim)
        if form.scale == "uncalibrated":
            return SideScales(scale=(1.0,) * count)
        amax = AMAX * (1 + layer / 8) * np.linspace(1.0, 1.3, count)
        if form.symmetric:
            return SideScales(scale=tuple(amax / form.largest))
        return SideScales(scale=tuple(1.9 * amax / form.code.levels), zero=tuple(-amax))

    layers = ({name: side(form, layer) for name, form in policy.sides(layer).items() if form.has_static_scales}
              for layer in range(shape.layers))  # fmt: skip
    return KVScales(layers=tuple(layers))


def _build(build: Callable[..., None], source: Path, out: Path, policy: KVPolicy, shape: KVShape) -> Path:
    out.mkdir(parents=True)
    scales = out.parent / f"{out.name}_scales.json"
    scales.write_text(static_scales(policy, shape).model_dump_json())
    build(source, out, policy=policy, scales=scales, progress=no_progress)
    return out


def make_bundle(decoder: Path, out: Path, policy: KVPolicy) -> Path:
    info = ModelInfo.model_validate_json((decoder / "model.json").read_bytes())
    return _build(build_bundle, decoder, out, policy, info.shape)


def make_reference_bundle(checkpoint: Path, out: Path, policy: KVPolicy) -> Path:
    """Build a bundle of backend=torch."""
    return _build(build_reference_bundle, checkpoint, out, policy, inspect_checkpoint(checkpoint).shape)


def make_engine(
    decoder: Path,
    out: Path,
    policy: KVPolicy,
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    max_pages: int = MAX_PAGES,
    **options: Any,
) -> OnnxEngine:
    engine = load_engine(make_bundle(decoder, out, policy), threads=1, **options)
    engine.prefill_chunk, engine.pool.max_pages = prefill_chunk, max_pages
    return engine


def forced(engine: Engine, texts: Sequence[Sequence[int]], steps: int = STEPS) -> np.ndarray:
    """Return logits (1 + steps, B, V): prefill each text without its last tokens, then decode the last tokens in a batch."""
    handles, logits = engine.prefill([text[:-steps] for text in texts])
    out = [logits, *(engine.decode(handles, [text[step] for text in texts]) for step in range(-steps, 0))]
    engine.release(handles)
    return np.array(out)


def make_reference(
    model: AutoModelForCausalLM, policy: KVPolicy, shape: KVShape, prefill_chunk: int = PREFILL_CHUNK
) -> TorchEngine:
    engine = TorchEngine.from_model(model, policy, static_scales(policy, shape))
    engine.prefill_chunk = prefill_chunk
    return engine


def load_model(checkpoint: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
