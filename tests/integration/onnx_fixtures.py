"""A tiny random Llama, its decoder skeleton, KV policies, and the reference that the ONNX engine must equal."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

from pipeline.kv import CODE_MAX, FP16_POLICY, Format, KVPolicy
from stages.onnx.build import build_bundle
from stages.onnx.engine import OnnxEngine, load_engine
from stages.onnx.export import export_decoder

KEY_AMAX, VALUE_AMAX = 3.0, 3.0
"""Static scales of the tests: clipping some of the random model's keys and values, as a calibrated amax may."""

FP16 = Format(dtype="fp16")
FP8 = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="calibrated")
FP8_UNIT = Format(dtype="fp8_e4m3", granularity="per_tensor", scale="uncalibrated")
FP8_TOKEN = Format(dtype="fp8_e4m3", granularity="per_token", scale="dynamic")
INT8 = Format(dtype="int8", granularity="per_token", scale="dynamic")
INT8_TENSOR = Format(dtype="int8", granularity="per_tensor", scale="calibrated")
INT8_G16 = Format(dtype="int8", granularity="per_group", group_size=16, scale="dynamic")
INT4 = Format(dtype="int4", granularity="per_token", scale="dynamic")
INT4_TENSOR = Format(dtype="int4", granularity="per_tensor", scale="calibrated")


def int4_groups(size: int) -> Format:
    return Format(dtype="int4", granularity="per_group", group_size=size, scale="dynamic")


POLICIES = [
    FP16_POLICY,
    KVPolicy(name="fp8", key=FP8, value=FP8),
    KVPolicy(name="fp8_uncalibrated", key=FP8_UNIT, value=FP8_UNIT),
    KVPolicy(name="fp8_per_token", key=FP8_TOKEN, value=FP8_TOKEN),
    KVPolicy(name="int8", key=INT8, value=INT8),
    KVPolicy(name="int8_mixed", key=INT8_G16, value=INT8_TENSOR),
    KVPolicy(name="fp8k_int4v", key=FP8, value=int4_groups(64)),
    KVPolicy(name="fp8k_int4v_g32", key=FP8, value=int4_groups(32)),
    KVPolicy(name="int4", key=INT4, value=INT4),
    KVPolicy(name="int4_g16", key=int4_groups(16), value=int4_groups(16)),
    KVPolicy(name="int4_per_tensor", key=INT4_TENSOR, value=INT4_TENSOR),
    KVPolicy(name="fp16_window", key=FP16, value=FP16, sink_tokens=4, recent_tokens=8),
    KVPolicy(name="int4_window", key=INT4, value=INT4, sink_tokens=4, recent_tokens=70),
    KVPolicy(name="int4_sinks", key=INT4_TENSOR, value=int4_groups(32), sink_tokens=66),
    KVPolicy(name="fp8_recent", key=FP8, value=FP8, recent_tokens=3),
]
BY_NAME = {policy.name: policy for policy in POLICIES}


def nothing(*_: object) -> None:
    """No progress."""


def save_model(config: object, path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")  # required of a checkpoint, and never read here
    return path


def llama_config(head_dim: int = 64) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip


def shared_checkpoint(factory: pytest.TempPathFactory) -> Path:
    """The random Llama, made once a session."""
    path = factory.getbasetemp() / "onnx_checkpoint"
    return path if path.exists() else save_model(llama_config(), path)


def shared_decoder(factory: pytest.TempPathFactory, dtype: str) -> Path:
    """Its skeleton; exporting takes seconds, so test modules share it through the session's temporary directory."""
    path = factory.getbasetemp() / f"onnx_decoder_{dtype}"
    return path if path.exists() else make_decoder(shared_checkpoint(factory), path, dtype)


def make_decoder(checkpoint: Path, path: Path, dtype: str = "float32") -> Path:
    path.mkdir()
    export_decoder(checkpoint, path, compute_dtype=dtype, progress=nothing)
    return path


def static_scales(policy: KVPolicy, layers: int) -> dict[str, list[float] | None]:
    out: dict[str, list[float] | None] = {}
    for side, form, amax in (("key", policy.key, KEY_AMAX), ("value", policy.value, VALUE_AMAX)):
        step = 1.0 if form.scale == "uncalibrated" else amax / CODE_MAX.get(form.dtype, 1.0)
        out[side] = [step * (1 + layer / 8) for layer in range(layers)] if form.static else None
    return out


def make_bundle(decoder: Path, out: Path, policy: KVPolicy) -> Path:
    out.mkdir(parents=True)
    layers = json.loads((decoder / "model.json").read_text())["layers"]
    scales = out.parent / f"{out.name}_scales.json"
    scales.write_text(json.dumps(static_scales(policy, layers)))
    build_bundle(decoder, out, policy=policy, scales=scales, progress=nothing)
    return out


def make_engine(decoder: Path, out: Path, policy: KVPolicy, **options: int) -> OnnxEngine:
    return load_engine(make_bundle(decoder, out, policy), threads=1, **options)


def encode(x: np.ndarray, form: Format, static: float | None) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Codes as stored (bytes or numbers), float16 scales (..., g) or None, and what reading gives, for x (..., D)."""
    x = x.astype(np.float32)
    if form.dtype == "fp16":
        half = x.astype(np.float16)
        return half, None, half.astype(np.float32)
    limit = CODE_MAX[form.dtype]
    groups = 1 if form.static else form.scales_per_token(x.shape[-1])
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    if form.static:
        scale, stored = np.float32(static), None
    else:
        amax = np.abs(grouped).max(-1, keepdims=True)
        stored = np.maximum(amax / np.float32(limit), np.float32(2**-14)).astype(np.float16)
        scale = stored.astype(np.float32)
    steps = np.clip(grouped / scale, -limit, limit)
    numbers = steps.astype(ml_dtypes.float8_e4m3fn) if form.dtype == "fp8_e4m3" else np.rint(steps).astype(np.int8)
    read = (numbers.astype(np.float32) * scale).reshape(x.shape)
    codes = numbers.reshape(x.shape)
    if form.dtype == "fp8_e4m3":
        codes = codes.view(np.uint8)
    if form.dtype == "int4":
        low, high = np.split(codes.astype(np.int16), 2, axis=-1)
        codes = ((high << 4) | (low + 8)).astype(np.int8)
    return codes, None if stored is None else stored[..., 0], read


class Reference:
    """transformers' own model, one sequence at a time, over a cache that is quantized and dequantized by formula."""

    def __init__(self, checkpoint: Path, policy: KVPolicy) -> None:
        AttentionInterface.register("onnx_reference", self._attention)
        AttentionMaskInterface.register("onnx_reference", lambda *_, **__: None)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="onnx_reference").eval()
        layers = self.model.config.num_hidden_layers
        self.policy, self.scales = policy, static_scales(policy, layers)
        self.past: list[list[np.ndarray]] = [[] for _ in range(layers)]

    def step(self, tokens: list[int]) -> np.ndarray:
        """Logits (V,) of the last of some tokens after the ones seen so far."""
        start = self.past[0][0].shape[1] if self.past[0] else 0
        positions = torch.arange(start, start + len(tokens))[None]
        AttentionInterface.register("onnx_reference", self._attention)
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0, -1].numpy()

    def _read(self, x: np.ndarray, form: Format, side: str, layer: int) -> torch.Tensor:
        scales = self.scales[side]
        read = encode(x, form, scales[layer] if scales else None)[2]
        count, exact = x.shape[1], x.astype(np.float16).astype(np.float32)
        where = np.arange(count)
        seen = (where < self.policy.sink_tokens) | (where >= count - self.policy.recent_tokens)
        return torch.from_numpy(np.where(seen[:, None], exact, read))

    def _attention(self, module, query, key, value, _mask, scaling, **_):
        layer = module.layer_idx
        k, v = key[0], value[0]
        keys, values = k, v
        past = 0
        if self.past[layer]:
            past = self.past[layer][0].shape[1]
            keys = torch.cat([self._read(self.past[layer][0], self.policy.key, "key", layer), k], 1)
            values = torch.cat([self._read(self.past[layer][1], self.policy.value, "value", layer), v], 1)
            k, v = (np.concatenate([old, new.numpy()], 1) for old, new in zip(self.past[layer], (k, v), strict=True))
        self.past[layer] = [np.asarray(k), np.asarray(v)]
        groups = query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        scores = query[0] @ keys.transpose(1, 2) * scaling
        rows = torch.arange(query.shape[2])[:, None] + past
        scores = scores.masked_fill(torch.arange(keys.shape[1])[None] > rows, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1)[None], None
