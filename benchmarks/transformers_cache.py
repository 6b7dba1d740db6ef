"""transformers' QuantizedCache, an optional peer of `benchmarks.numerics`: INT4 by optimum-quanto or HQQ.

The libraries stay out of kvgate's environment: PYTHONPATH names the folder that they are installed into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.recording import log
from stages.engines.interface import Logits
from stages.policies.policy import KVShape

GROUP, RESIDUAL = 64, 128
"""Numbers per scale, and the most recent tokens that stay exact: transformers' defaults."""


@dataclass(frozen=True)
class CacheLibrary:
    """A library that quantizes transformers' cache."""

    name: str
    """Value of QuantizedCache's `backend`."""
    module: str
    packages: str
    """Packages to install, without their dependencies: torch must not be replaced."""
    axis: int
    """Axis of the groups of keys and values, as transformers' documentation recommends for the library."""


LIBRARIES = (
    CacheLibrary("quanto", "optimum", "optimum-quanto==0.2.7", 0),
    CacheLibrary("hqq", "hqq", "hqq==0.2.8.post1 termcolor einops", 1),
)


@dataclass(frozen=True)
class QuantizedCacheEngine:
    """A model of transformers with a QuantizedCache of 4 bits.

    The cache quantizes the prompt, then keeps new tokens exact until RESIDUAL tokens have come, and quantizes all tokens again.
    """

    model: Any
    library: CacheLibrary

    @torch.inference_mode()
    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Prefill the tokens before `first`, decode the others one by one, and return the logits of each decoded token."""
        from transformers.cache_utils import QuantizedCache

        axes = {"axis_key": self.library.axis, "axis_value": self.library.axis}
        options: dict[str, Any] = {"nbits": 4, "q_group_size": GROUP, "residual_length": RESIDUAL, **axes}
        cache = QuantizedCache(backend=self.library.name, config=self.model.config, **options)
        self.model(torch.tensor([list(tokens[:first])]), past_key_values=cache, logits_to_keep=1)
        rows = [self.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in tokens[first:]]
        return np.asarray(torch.stack(rows))


def peers(model: Any) -> Mapping[str, QuantizedCacheEngine]:
    """Return an engine for each installed library, and log how to install the others."""
    engines = {}
    for library in LIBRARIES:
        if find_spec(library.module) is None:
            install = f"pip install --target work/peers/transformers --no-deps {library.packages}"
            log(f"{library.name} is missing: {install}; then set PYTHONPATH=work/peers/transformers")
        else:
            engines[f"transformers {library.name} int4"] = QuantizedCacheEngine(model, library)
    return engines


def bytes_per_token(shape: KVShape) -> int:
    """Return the bytes of a token that is not exact: 4-bit codes, and a scale and a zero of 16 bits for each group."""
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return numbers // 2 + numbers // GROUP * 4
