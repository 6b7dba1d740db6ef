"""llama.cpp's treatment of queries and keys: its channel order, and the 8-bit rounding of queries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stages.checkpoints.gguf.model import pairs_neighbours
from stages.engines.reference.attention import Taken
from stages.engines.reference.cache import LayerStorage
from stages.engines.reference.formats import rotated
from stages.policies.ggml.arithmetic_torch import asked
from stages.policies.policy import Side


def as_llamacpp(config: Any, storages: Sequence[LayerStorage]) -> Taken | None:
    """Return llama.cpp's transformation of queries and keys; None if no layer's keys have a llama.cpp block type."""
    forms = [layer[Side.KEY].form for layer in storages]
    if not any(form.code.dynamic_group for form in forms):
        return None

    def taken(layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        form = forms[layer]
        if not form.code.dynamic_group:
            return query, key
        places = order(str(config.model_type), key.shape[-1], key.device)
        return rotated(asked(rotated(query[..., places], form)), form), key[..., places]

    return taken


def order(model_type: str, head_dim: int, device: torch.device) -> Tensor:
    """Return, for each channel of llama.cpp's heads, the index of transformers' channel.

    For some models, llama.cpp's rotary embedding pairs neighbouring channels, and transformers' pairs the two halves.
    """
    places = torch.arange(head_dim, device=device)
    return places.view(2, -1).T.flatten() if pairs_neighbours(model_type) else places
