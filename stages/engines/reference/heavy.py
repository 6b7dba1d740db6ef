"""H2O's cache (arXiv 2306.14048): every KV head of every layer keeps its own heavy hitters, the sinks and the latest tokens.

A token's weight is the attention that it has received, summed over all queries and the query heads of its KV head.
After every appended chunk or decoded token, the cache keeps the first `sink_tokens`, the latest `window_tokens` and, from the
tokens between them, the `heavy_tokens` with the largest weights (the earlier token wins a tie). Dropped tokens and their
weights never come back. A chunk attends to itself exactly and causally, and to the earlier tokens that are kept.

Which tokens are kept depends on all earlier attention. Rows are therefore computed chunk by chunk within a layer, while other
caches allow arbitrary blocks of rows. One pass over a sequence is still one pass over the layers.

Shapes: H KV heads, G query heads per KV head, R new tokens, n kept tokens, S tokens of a view, D head_dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.engines.reference.attention import Span
from stages.engines.reference.cache import LayerStorage
from stages.engines.reference.formats import CPU
from stages.engines.reference.model import LayerAttention
from stages.policies.policy import SIDES, Eviction, KVPolicy, KVShape, Side


@dataclass(frozen=True)
class HeavyCache:
    """Immutable keys and values of one layer of one sequence; `attend` returns a new cache."""

    eviction: Eviction
    storages: LayerStorage
    length: int
    positions: Tensor
    """Ascending positions (H, n) of the kept tokens."""
    weights: Tensor
    """Sum of the attention (H, n) that the kept tokens have received."""
    states: Mapping[Side, Tensor]
    """Keys and values (H, n, D) of the kept tokens as computed; they are quantized when they are read."""

    @classmethod
    def empty(cls, policy: KVPolicy, shape: KVShape, storages: LayerStorage, device: torch.device = CPU) -> "HeavyCache":
        assert policy.eviction is not None
        none = torch.zeros(shape.kv_heads, 0, device=device)
        states = dict.fromkeys(SIDES, torch.zeros(shape.kv_heads, 0, shape.head_dim, device=device))
        return cls(policy.eviction, storages, 0, none.long(), none, states)

    def attend(self, q: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> tuple[Tensor, "HeavyCache"]:
        """Append new tokens (H, R, D); return the attention (H, G, R, D) of their scaled queries q, and the new cache."""
        rows = q.shape[2]
        new = {Side.KEY: key, Side.VALUE: value}
        keys, values = (torch.cat([self.storages[side].round(self.states[side]).to(x.dtype), x], 1) for side, x in new.items())
        scores = options.cap(q @ keys.unsqueeze(1).transpose(-1, -2))
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores[..., -rows:].masked_fill_(later, -torch.inf)
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks[..., None, None].to(q.dtype).expand(-1, -1, rows, 1)], dim=-1)
        attention = scores.softmax(-1)[..., : keys.shape[1]]
        received = attention.sum((1, 2))
        weights = torch.cat([self.weights.to(received.dtype), torch.zeros_like(received[:, -rows:])], dim=1) + received
        positions = torch.arange(self.length, self.length + rows, device=q.device).expand(len(weights), -1)
        appended = replace(
            self,
            length=self.length + rows,
            positions=torch.cat([self.positions, positions], dim=1),
            weights=weights,
            states={side: torch.cat([self.states[side], x], dim=1) for side, x in new.items()},
        )
        return attention @ values.unsqueeze(1), appended._evict()

    def _evict(self) -> "HeavyCache":
        count, sinks, heavy = self.positions.shape[1], self.eviction.sink_tokens, self.eviction.heavy_tokens
        older = max(0, count - self.eviction.window_tokens)
        if older <= sinks + heavy:
            return self
        by_rank = self.ranks[:, sinks:older].sort(dim=1, descending=True, stable=True).indices
        chosen = sinks + by_rank[:, :heavy].sort(dim=1).values
        index = torch.arange(count, device=chosen.device).expand(len(chosen), -1)
        return self._select(torch.cat([index[:, :sinks], chosen, index[:, older:]], dim=1))

    @property
    def ranks(self) -> Tensor:
        """Ranks (H, n) of the kept tokens: between the sinks and the window, the tokens with the largest ranks are kept."""
        return self.weights

    def _select(self, index: Tensor) -> "HeavyCache":
        """Return a cache with only the tokens at the indices `index` (H, n)."""
        return replace(
            self,
            positions=self.positions.gather(1, index),
            weights=self.weights.gather(1, index),
            states={side: x.gather(1, index[..., None].expand(-1, -1, x.shape[-1])) for side, x in self.states.items()},
        )


class HeavyView:
    """New tokens of a sequence over the caches of all layers.

    Only `store` replaces the caches, so a refused token changes nothing.
    """

    def __init__(self, caches: list[HeavyCache], spans: Sequence[Span]) -> None:
        """Create a view of the tokens in consecutive `spans`, which follow the cached tokens."""
        self.caches = caches
        self.first_row = spans[0].begin
        assert not any(span.itself for span in spans), "engines that read their own tokens from the cache evict nothing"
        self.chunks = [chunk for span in spans for chunk in _chunks(span)]
        self.after: list[HeavyCache] = []

    def attend(self, layer: int, q: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        assert options.window is None, "eviction is refused for models with sliding windows"
        cache, outs = self.caches[layer], []
        for chunk in self.chunks:
            rows = slice(chunk.start - self.first_row, chunk.stop - self.first_row)
            out, cache = cache.attend(q[:, :, rows], key[:, rows], value[:, rows], options)
            outs.append(out)
        self.after.append(cache)
        return torch.cat(outs, dim=2)

    def store(self) -> None:
        self.caches[:] = self.after


def _chunks(span: Span) -> list[range]:
    if span.start is not None:
        return [range(span.begin, span.end)]
    return [range(row, row + 1) for row in range(span.begin, span.end)]
