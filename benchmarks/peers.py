"""The peers of the engine and the oracle: transformers' own caches on the same model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache, DynamicCache, QuantizedCache

GROUP_SIZE = 64
BITS = 4
RESIDUAL = 128
"""QuantizedCache's defaults: groups of 64, and up to 127 tokens in full precision, quantized with all others by every
128th step."""

AXES = {"quanto": 0, "hqq": 1}
"""transformers' documentation recommends axis 0 for quanto and 1 for hqq."""


def _quantized(backend: str) -> Callable[[Any], Cache]:
    axis = AXES[backend]
    return lambda config: QuantizedCache(
        backend, config, nbits=BITS, axis_key=axis, axis_value=axis, q_group_size=GROUP_SIZE, residual_length=RESIDUAL
    )


CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "quanto": _quantized("quanto"),
    "hqq": _quantized("hqq"),
}
QUANTIZED = tuple(AXES)
"""Names of the peers with a QuantizedCache."""


class Peer:
    """A transformers model that decodes with one of CACHES."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name
        self.cache: Cache | None = None

    @torch.inference_mode()
    def start(self, prompts: npt.NDArray[np.int64]) -> None:
        """Prefill prompts (B, S) in one forward pass."""
        self.cache = CACHES[self.name](self.model.config)
        self.model(torch.from_numpy(prompts), past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def step(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Decode one token of each sequence: logits (B, V)."""
        ids = torch.tensor(tokens)[:, None]
        logits: npt.NDArray[np.float32] = self.model(ids, past_key_values=self.cache, use_cache=True).logits[:, -1].numpy()
        return logits

    def stop(self) -> None:
        """Drop the cache."""
        self.cache = None


def cache_bytes(model: Any, name: str, tokens: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the bytes per token of one sequence's cache right after its prefill.

    All of a QuantizedCache is quantized then, which is when it is smallest.

    Args:
        model: A transformers model.
        name: A peer of CACHES.
        tokens: (1, S) token ids.

    Returns:
        "codes": bytes of the codes; "allocated": with scales and shifts as they are stored; "float16_parameters": with scales
        and shifts in float16.
    """
    peer = Peer(model, name)
    peer.start(tokens)
    assert peer.cache is not None
    codes, parameters = 0, []
    layers: list[Any] = peer.cache.layers
    for layer in layers:
        if name == "dynamic":
            codes += layer.keys.nbytes + layer.values.nbytes
            continue
        for stored in (layer._quantized_keys, layer._quantized_values):
            if name == "quanto":
                codes += stored._data._data.nbytes
                parameters += [stored._scale, stored._shift]
            else:
                packed, meta = stored
                codes += packed.nbytes
                parameters += [meta["scale"], meta["zero"]]
    count = tokens.shape[1]
    return {
        "codes": codes / count,
        "allocated": (codes + sum(p.nbytes for p in parameters)) / count,
        "float16_parameters": (codes + 2 * sum(p.numel() for p in parameters)) / count,
    }
