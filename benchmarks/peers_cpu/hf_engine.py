"""transformers' DynamicCache and QuantizedCache, float32 on a CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optimum.quanto  # noqa: F401  registers torch.ops.quanto
import torch
from transformers import Cache, DynamicCache, QuantizedCache

from benchmarks.benchlib import load_model
from benchmarks.peers_cpu.contender import CacheBytes, Contender, Logits, Setting

GROUP_SIZE, RESIDUAL = 64, 128
"""QuantizedCache's defaults: groups of 64, and up to 127 tokens in full precision, quantized by every 128th step."""

AXES = {"quanto": 0, "hqq": 1}
"""transformers' documentation recommends axis 0 for quanto and 1 for hqq."""

_MODELS: dict[str, Any] = {}


def prepare(_setting: Setting) -> None:
    """Let quanto compile its extension, once an installation, so that no timed step does."""
    torch.ops.quanto.unpack(torch.zeros(8, dtype=torch.uint8), 4)


def open_contender(kv: str, setting: Setting) -> Contender:
    """Return a contender; all of them share one model."""
    torch.set_num_threads(setting.threads)
    if "model" not in _MODELS:
        _MODELS["model"] = load_model(setting.checkpoint)
    return TransformersContender(_MODELS["model"], kv)


class TransformersContender(Contender):
    """One cache class of transformers."""

    def __init__(self, model: Any, kv: str) -> None:
        self.model, self.kv = model, kv
        self.cache: Any = None

    def _new_cache(self) -> Cache:
        if self.kv == "dynamic":
            return DynamicCache(config=self.model.config)
        backend, bits = self.kv.split("_int")
        axis = AXES[backend]
        return QuantizedCache(
            backend,
            self.model.config,
            nbits=int(bits),
            axis_key=axis,
            axis_value=axis,
            q_group_size=GROUP_SIZE,
            residual_length=RESIDUAL,
        )

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.cache = self._new_cache()
        return np.asarray(self._forward(torch.tensor([list(tokens)]))[0])

    @torch.inference_mode()
    def replicate(self, batch: int) -> None:
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                setattr(layer, name, states.repeat(batch, 1, 1, 1) if states.ndim == 4 else states)
                if self.kv != "dynamic":
                    quantized = f"_quantized_{name}"
                    whole = layer._dequantize(getattr(layer, quantized)).repeat(batch, 1, 1, 1)
                    axis = layer.axis_key if name == "keys" else layer.axis_value
                    setattr(layer, quantized, layer._quantize(whole, axis=axis))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        return self._forward(torch.tensor(tokens)[:, None])

    def _forward(self, ids: torch.Tensor) -> Logits:
        logits: Logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1].numpy()
        return logits

    def cache_bytes(self) -> CacheBytes:
        total, count = 0, self.cache.get_seq_length()
        for layer in self.cache.layers:
            if self.kv == "dynamic":
                total += layer.keys.nbytes + layer.values.nbytes
                continue
            for stored in (layer._quantized_keys, layer._quantized_values):
                if self.kv.startswith("quanto"):
                    parts = [stored._data._data, stored._scale, stored._shift]
                else:
                    packed, meta = stored
                    parts = [packed, meta["scale"], meta["zero"]]
                total += sum(part.nbytes for part in parts)
        return CacheBytes(total / count, "measured: tensors right after a prefill, when nothing is residual")

    def close(self) -> None:
        self.cache = None
