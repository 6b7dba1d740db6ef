"""An independent reader of TensorRT-LLM's checkpoint format (1.2.1) and the decoder that it describes, in plain torch.

Written from TensorRT-LLM's own reading of the format, not from the exporter that writes it, and it imports nothing of
kvgate: where both agree, `trtllm-build` is given what was meant. The tag itself was not available: each file was read in
the stored version nearest to it (layers.py: the one with FP4 and `is_qkv`; modeling_utils.py: the one that merges the
cache's scales). In our own words, file by file:

- docs/source/architecture/checkpoint.md: config.json and rank{r}.safetensors; linear weights are (out_features,
  in_features) whatever layout an engine wants; the names of tensors.
- tensorrt_llm/models/modeling_utils.py, preprocess_weights: separate `k_cache_scaling_factor` and `v_cache_scaling_factor`
  are replaced by their maximum, `kv_cache_scaling_factor`, whose reciprocal is derived; FP8 weights may come as int8 bytes;
  an INT4 AWQ weight is int8 whose transpose (in, out / 2) holds two outputs a byte, its scales (out, in / group) likewise.
- tensorrt_llm/quantization/layers.py: FP8Linear and FP8RowLinear (x and W are codes times one scale each),
  Int8SmoothQuantLinear (x times prequant, then codes times one scale; W codes times a scale an output channel),
  WeightOnlyGroupwiseQuantLinear (x times prequant; W codes times a scale a group of inputs and output).
- cpp/tensorrt_llm/thop/weightOnlyQuantOp.cpp, unpack_int4_packed_tensor_to_int8: the low four bits are the even element,
  both are signed.
- tensorrt_llm/layers/attention.py: `kv_cache_scaling_factor` is what a code is multiplied with (kv_quant_orig), and the
  reciprocal is what is multiplied before rounding; the current token's key and value are attended as they are.
- tensorrt_llm/models/llama/{convert,model}.py, layers/mlp.py: qkv is q | k | v along the outputs; fc is gate_proj, gate is
  up_proj, and the MLP is proj(silu(fc(x)) * gate(x)); RoPE rotates halves (`rope_gpt_neox`).

Legend: T = tokens, H = heads, D = head_size, O = out_features, I = in_features.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
NORMS = ("input_layernorm", "post_layernorm")
E4M3_MAX = 448.0


class FormatError(ValueError):
    """The checkpoint is not what TensorRT-LLM 1.2.1 would read."""


@dataclass(frozen=True)
class Linear:
    """One linear layer: y = round(x * prequant) W^T."""

    weight_OI: torch.Tensor
    """Dequantized."""
    prequant_I: torch.Tensor | None
    act_scale: torch.Tensor | None
    act_kind: str
    """How activations are rounded: `fp8`, `int8` or not at all."""

    def __call__(self, x_TI: torch.Tensor, round_activations: bool) -> torch.Tensor:
        if self.prequant_I is not None:
            x_TI = x_TI * self.prequant_I
        if round_activations and self.act_scale is not None:
            x_TI = _round(x_TI, self.act_scale, self.act_kind)
        return x_TI @ self.weight_OI.T


def _round(values: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Quantize with `values / scale`, saturating, ties to even, and dequantize."""
    scaled = values / scale
    if kind == "fp8":
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return scaled.round().clamp(-128, 127) * scale


class Checkpoint:
    """`config.json` and `rank0.safetensors` of one rank; every tensor must be one that the configuration asks for."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "rank0.safetensors")
        mapping = self.config.get("mapping", {})
        if mapping.get("world_size", 1) != 1 or (directory / "rank1.safetensors").exists():
            raise FormatError(f"mapping {mapping}: this reader joins no ranks")
        if self.config["architecture"] != "LlamaForCausalLM" or self.config["hidden_act"] != "silu":
            raise FormatError(f"{self.config['architecture']} with {self.config['hidden_act']}: not a Llama decoder")
        if (self.config["position_embedding_type"], self.config.get("rotary_pct", 1.0)) != ("rope_gpt_neox", 1.0):
            raise FormatError(f"position_embedding_type {self.config['position_embedding_type']}: only rope_gpt_neox is read")
        quantization = self.config.get("quantization") or {}
        self.algorithm: str | None = quantization.get("quant_algo")
        self.kv_algorithm: str | None = quantization.get("kv_cache_quant_algo")
        self.group_size: int = quantization.get("group_size") or 64
        if quantization.get("has_zero_point"):
            raise FormatError("has_zero_point: AWQ with zeros is not read")
        self._used: set[str] = set()
        layers = range(self.config["num_hidden_layers"])
        self.embedding = self._take("transformer.vocab_embedding.weight").float()
        self.ln_f = self._take("transformer.ln_f.weight").float()
        self.lm_head = self._take("lm_head.weight").float()
        self.norms = [{n: self._take(f"transformer.layers.{i}.{n}.weight").float() for n in NORMS} for i in layers]
        self.linears = [{name: self._linear(f"transformer.layers.{i}.{name}") for name in LINEARS} for i in layers]
        self.kv_scales = [self._kv_scale(f"transformer.layers.{i}.attention") for i in layers]
        unused = sorted(self.tensors.keys() - self._used)
        if unused:
            raise FormatError(f"{unused[0]}: nothing in config.json asks for it")

    def _take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self.tensors:
            raise FormatError(f"{name} is missing")
        self._used.add(name)
        tensor = self.tensors[name]
        if dtype is not None and tensor.dtype != dtype:
            raise FormatError(f"{name} is {tensor.dtype}, must be {dtype} for quant_algo {self.algorithm}")
        return tensor

    def _linear(self, base: str) -> Linear:
        if self.algorithm is None:
            return Linear(self._take(f"{base}.weight").float(), None, None, "none")
        if self.algorithm == "FP8":
            weight_OI = self._take(f"{base}.weight")
            codes_OI = weight_OI.view(torch.float8_e4m3fn) if weight_OI.dtype == torch.int8 else weight_OI
            if codes_OI.dtype != torch.float8_e4m3fn:
                raise FormatError(f"{base}.weight is {codes_OI.dtype}, must be FP8 E4M3 or its bytes")
            act = self._scale(f"{base}.activation_scaling_factor", 1)
            return Linear(codes_OI.float() * self._scale(f"{base}.weights_scaling_factor", 1), None, act, "fp8")
        codes_OI = self._take(f"{base}.weight", torch.int8)
        prequant_I = self._take(f"{base}.prequant_scaling_factor").float().reshape(-1)
        if self.algorithm == "W8A8_SQ_PER_CHANNEL":
            scale_O = self._scale(f"{base}.weights_scaling_factor", codes_OI.shape[0])
            act = self._scale(f"{base}.activation_scaling_factor", 1)
            return Linear(codes_OI.float() * scale_O[:, None], prequant_I, act, "int8")
        if self.algorithm == "W4A16_AWQ":
            unpacked_OI = unpack_int4(codes_OI.T.contiguous()).T
            outs, ins = unpacked_OI.shape
            scale_OG = self._scale(f"{base}.weights_scaling_factor", outs * ins // self.group_size)
            scale_OI = scale_OG.reshape(outs, ins // self.group_size).repeat_interleave(self.group_size, dim=1)
            return Linear(unpacked_OI.float() * scale_OI, prequant_I, None, "none")
        raise FormatError(f"quant_algo {self.algorithm} is not read")

    def _scale(self, name: str, count: int) -> torch.Tensor:
        scale = self._take(name, torch.float32)
        if scale.numel() != count or not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise FormatError(f"{name}: {count} positive numbers are needed, got {tuple(scale.shape)}")
        return scale.reshape(-1)

    def _kv_scale(self, base: str) -> torch.Tensor | None:
        """The scale of keys and values of a layer, None where the cache is not quantized."""
        if self.kv_algorithm is None:
            return None
        if self.kv_algorithm not in ("FP8", "INT8"):
            raise FormatError(f"kv_cache_quant_algo {self.kv_algorithm} is not read")
        separate = [f"{base}.{side}_cache_scaling_factor" for side in ("k", "v")]
        together = f"{base}.kv_cache_scaling_factor"
        if any(name in self.tensors for name in separate):
            shared = torch.maximum(*(self._scale(name, 1) for name in separate))
            if together in self.tensors and not torch.equal(self._scale(together, 1), shared):
                raise FormatError(f"{together} is not the maximum of {' and '.join(separate)}, which replaces it")
            return shared
        return self._scale(together, 1)

    def forced(self, tokens: list[int], first: int, round_activations: bool = True) -> torch.Tensor:
        """Logits (len(tokens), vocab_size): row r follows tokens[: r + 1], of which the first `first` were one prefill and
        each later one a decode step that read the quantized cache."""
        config = self.config
        head_size = config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]
        q_heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or q_heads
        x_TI = self.embedding[torch.tensor(tokens)]
        cos_TD, sin_TD = _rope(len(tokens), head_size, config["rotary_base"])
        for norms, linears, kv_scale in zip(self.norms, self.linears, self.kv_scales, strict=True):
            hidden_TI = _rms_norm(x_TI, norms["input_layernorm"], config["norm_epsilon"])
            qkv: Any = linears["attention.qkv"](hidden_TI, round_activations)
            q, k, v = qkv.split([q_heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=-1)
            q_HTD, k_HTD, v_HTD = (part.reshape(len(tokens), -1, head_size).transpose(0, 1) for part in (q, k, v))
            q_HTD, k_HTD = _rotate(q_HTD, cos_TD, sin_TD), _rotate(k_HTD, cos_TD, sin_TD)
            repeat = q_heads // kv_heads
            k_HTD, v_HTD = k_HTD.repeat_interleave(repeat, 0), v_HTD.repeat_interleave(repeat, 0)
            attended_HTD = self._attend(q_HTD, k_HTD, v_HTD, first, kv_scale)
            attended_TI = attended_HTD.transpose(0, 1).reshape(len(tokens), -1)
            x_TI = x_TI + linears["attention.dense"](attended_TI, round_activations)
            hidden_TI = _rms_norm(x_TI, norms["post_layernorm"], config["norm_epsilon"])
            gated_TI = torch.nn.functional.silu(linears["mlp.fc"](hidden_TI, round_activations))
            gated_TI = gated_TI * linears["mlp.gate"](hidden_TI, round_activations)
            x_TI = x_TI + linears["mlp.proj"](gated_TI, round_activations)
        return _rms_norm(x_TI, self.ln_f, config["norm_epsilon"]) @ self.lm_head.T

    def _attend(
        self, q_HTD: torch.Tensor, k_HTD: torch.Tensor, v_HTD: torch.Tensor, first: int, kv_scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Prompt rows read fresh keys and values, decoded rows the cache for all tokens but their own."""
        length = q_HTD.shape[1]
        kind = str(self.kv_algorithm).lower()
        stored_k, stored_v = (x if kv_scale is None else _round(x, kv_scale, kind) for x in (k_HTD, v_HTD))
        rows = torch.arange(length)
        fresh = (rows[:, None] == rows[None, :]) | (rows[:, None] < first)
        causal = rows[None, :] <= rows[:, None]
        scores = torch.where(fresh, q_HTD @ k_HTD.transpose(1, 2), q_HTD @ stored_k.transpose(1, 2)) / q_HTD.shape[-1] ** 0.5
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        attended: torch.Tensor = (weights * fresh) @ v_HTD + (weights * ~fresh) @ stored_v
        return attended


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int8 (rows, columns / 2) -> signed values (rows, columns); the low four bits are the even column."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack((low, high), dim=-1).reshape(packed.shape[0], -1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _rope(length: int, head_size: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().float(), both.sin().float()


def _rotate(x_HTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    low, high = x_HTD.chunk(2, dim=-1)
    return x_HTD * cos_TD + torch.cat((-high, low), dim=-1) * sin_TD
