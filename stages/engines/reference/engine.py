"""The reference engine: transformers' own model, in float32, over a cache that is quantized when it is read.

It serves backend=torch on a CPU. Judged engines are compared with this engine on the device of `reference.device`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stages.checkpoints.gguf.model import pairs_neighbours
from stages.checkpoints.loading import load_causal_lm
from stages.core.records import MemoryReport, StoredCopy
from stages.engines.base import ChunkedEngine, SequenceTable, check_finite
from stages.engines.bundle import ShapedRecord, open_bundle
from stages.engines.interface import Logits
from stages.engines.reference.attention import ATTENTION, Block, ConcatenatedViews, Fed, Preparation, Span, View, plan_blocks
from stages.engines.reference.build import BACKEND
from stages.engines.reference.cache import LayerCache, LayerStorage, layer_storages
from stages.engines.reference.formats import CPU, rotate
from stages.engines.reference.heavy import HeavyCache, HeavyView
from stages.engines.reference.model import head, hidden_states, place_model, round_inputs, scales_for, shape_for, within_memory
from stages.engines.reference.replay import CachedView, OnePassView, Replay, disturb_layers
from stages.policies.ggml.arithmetic_torch import round_queries
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, Side
from stages.policies.scales import KVScales


def load_engine(bundle: Path, *, threads: int, device: torch.device = CPU) -> "TorchEngine":
    """Load a bundle. `threads` applies to all of torch in this process. Raises MissingRequirement if the GPU is too small."""
    _, policy, scales = open_bundle(bundle, ShapedRecord, BACKEND)
    torch.set_num_threads(threads)
    model = place_model(load_causal_lm(bundle, dtype=torch.float32), device)
    round_inputs(model)
    return TorchEngine.from_model(model, policy, scales)


class TorchEngine(ChunkedEngine):
    """The reference engine in plain torch. Decoding step by step is slow; one pass over a sequence is fast."""

    def __init__(self, model: Any, policy: KVPolicy, shape: KVShape, storages: list[LayerStorage]) -> None:
        super().__init__(policy, shape, int(model.config.vocab_size))
        self.model, self.storages = model, storages
        self.sequences: SequenceTable[list[LayerCache] | list[HeavyCache]] = SequenceTable()
        """Caches of all layers, by handle."""
        self.reads_itself = False
        """Whether `forced` and `replay` read a token's own key and value from the cache, as engines do that store it first."""
        self._llamacpp_preparation = llamacpp_preparation(model.config, storages)

    @property
    def rounds_queries(self) -> bool:
        """Whether queries are rounded to 8-bit blocks, as in llama.cpp if the keys are stored in blocks."""
        return self._llamacpp_preparation is not None

    @classmethod
    def from_model(cls, model: Any, policy: KVPolicy, scales: KVScales | None = None) -> Self:
        """Wrap transformers' causal language model (float32), on its own device. `scales`: None if no side is static."""
        shape = shape_for(model, policy)
        scales = scales_for(policy, shape, scales)
        return cls(model.eval(), policy, shape, layer_storages(policy, shape, scales, model.device))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def _start(self) -> int:
        if self._keeps_heavy:
            return self.sequences.add(self._heavy_caches())
        return self.sequences.add([LayerCache.empty(self.shape, self.device)] * self.shape.layers)

    @property
    def _keeps_heavy(self) -> bool:
        """Whether the policy is H2O's, in which a token's attention decides which tokens the next token reads."""
        return self.policy.eviction is not None and self.policy.eviction.heavy_tokens > 0

    def _heavy_caches(self) -> list[HeavyCache]:
        return [HeavyCache.empty(self.policy, self.shape, storages, self.device) for storages in self.storages]

    def _view(self, handle: int, span: Span) -> CachedView | HeavyView:
        caches: Any = self.sequences[handle]
        if self._keeps_heavy:
            return HeavyView(caches, [span])
        return CachedView(self.policy, self.storages, self._plan([span]), caches)

    @torch.inference_mode()
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        begin = 0
        for chunk in self._chunks(prompt):
            end = begin + len(chunk)
            view = self._view(sequence, Span(begin, end, begin))
            hidden = self._hidden([chunk], torch.arange(begin, end)[None], [view])
            view.store()
            begin = end
        logits: Logits = self._logits(hidden[:, -1:])[0, 0]
        return logits

    @torch.inference_mode()
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        lengths = [self.sequences[handle][0].length for handle in sequences]
        views = [self._view(handle, Span(length, length + 1, None)) for handle, length in zip(sequences, lengths, strict=True)]
        hidden = self._hidden([[token] for token in tokens], torch.tensor(lengths)[:, None], views)
        for view in views:
            view.store()
        logits: Logits = self._logits(hidden[:, -1:])[:, 0]
        return logits

    @torch.inference_mode()
    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        self._check_forced(tokens, first)
        fed = Fed(tokens, [(first, False), (len(tokens) - first, True)])
        spans = fed.spans(self.prefill_chunk, itself=self.reads_itself)
        hidden = self._hidden([tokens], torch.arange(len(tokens))[None], [self._one_pass_view(spans)])
        logits: Logits = self._logits(hidden[:, first:])[0]
        return logits

    def _one_pass_view(self, spans: Sequence[Span]) -> View:
        if self._keeps_heavy:
            return HeavyView(self._heavy_caches(), spans)
        return OnePassView(self.policy, self.storages, self._plan(spans))

    @torch.inference_mode()
    def replay(
        self,
        sequences: Sequence[Fed],
        caches: Sequence[Sequence[Mapping[Side, StoredCopy]]] = (),
        *,
        rounding: float = 0.0,
        origins: Sequence[tuple[int, int]] = (),
    ) -> list[Replay]:
        """Compute whole sequences together, each in one pass, over the caches that another engine stored. Keeps no sequence.

        Args:
            sequences: Tokens, and how the judged engine was fed: prompts, later chunks and decoded tokens in any order.
            caches: The judged engine's stored layers, by sequence, in this policy's formats. If a sequence has no layers, or
                `caches` is empty, the reference engine's own codes are read.
            rounding: Noise on each layer's output in the disturbed rows, relative to the output's root mean square; 0 skips
                the disturbed rows.
            origins: For each sequence, the index of an earlier sequence, and the number of leading tokens for which both have
                equal ids and stored copies. These are computed once, and their logits are returned only for the earlier one.
        """
        if self._keeps_heavy or not origins:
            origins = [(0, 0)] * len(sequences)
        passes = 2 if rounding else 1
        begins = [begin for _, begin in origins]
        lengths = [len(fed.tokens) - begin for fed, begin in zip(sequences, begins, strict=True)]
        ids = [token for fed, begin in zip(sequences, begins, strict=True) for token in fed.tokens[begin:]]
        positions = torch.cat([torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)])
        parts = self._replay_views(sequences, caches or [()] * len(sequences), origins, passes)
        views = [ConcatenatedViews(row, lengths) for row in zip(*parts, strict=True)]
        with disturb_layers(self.model, rounding) if rounding else nullcontext():
            hidden = self._hidden([ids] * passes, positions.expand(passes, -1), views, checked=False)
        scored = [[place - begin for place in fed.rows if place >= begin] for fed, begin in zip(sequences, begins, strict=True)]
        logits = [
            [self._logits(part[None, places])[0] for part, places in zip(row.split(lengths), scored, strict=True)]
            for row in hidden
        ]
        firsts = [part[0].errors if isinstance(part[0], OnePassView) else [] for part in parts]
        errors = [[{side: error.cpu() for side, error in layer.items()} for layer in layers] for layers in firsts]
        return [Replay(sound, off, layers) for sound, off, layers in zip(logits[0], logits[-1], errors, strict=True)]

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> list[tuple[int, Side, Tensor, Tensor]]:
        """Compute a prompt in one chunk.

        Return layer, side, and the keys or values (H, T, D) as computed and as read from the cache.
        """
        empty = [LayerCache.empty(self.shape, self.device)] * self.shape.layers
        view = CachedView(self.policy, self.storages, self._plan([Span(0, len(tokens), 0)]), empty)
        self._hidden([tokens], torch.arange(len(tokens))[None], [view], checked=False)
        return [
            (layer, side, x, self.storages[layer][side].round(x))
            for layer, cache in enumerate(view.after)
            for side, x in ((Side.KEY, cache.key), (Side.VALUE, cache.value))
        ]

    def _replay_views(
        self, sequences: Sequence[Fed], caches: Sequence[Any], origins: Sequence[tuple[int, int]], passes: int
    ) -> list[Sequence[Any]]:
        parts: list[Sequence[Any]] = []
        for fed, layers, (origin, begin) in zip(sequences, caches, origins, strict=True):
            spans = fed.spans(self.prefill_chunk, itself=self.reads_itself, begin=begin)
            if self._keeps_heavy:
                parts.append([self._one_pass_view(spans) for _ in range(passes)])
                continue
            blocks, rows = self._plan(spans), list[OnePassView]()
            for number in range(passes):
                base = (parts[origin][number], begin) if begin else None
                rows.append(OnePassView(self.policy, self.storages, blocks, layers, rows[0] if rows else None, origin=base))
            parts.append(rows)
        return parts

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        """Return the stored copies by layer. Empty for H2O, whose heads keep different tokens."""
        caches: Any = self.sequences[sequence]
        if self._keeps_heavy:
            return []
        return [cache.stored(self.policy, self.shape, layer) for cache, layer in zip(caches, self.storages, strict=True)]

    def _release(self, sequence: int) -> None:
        del self.sequences[sequence]

    def memory(self) -> MemoryReport:
        """Return the bytes that the policy needs for the live sequences. There are no spare pages."""
        policy, shape = self.policy, self.shape
        lengths = [sequence[0].length for sequence in self.sequences.values()]
        pages, window_pages = sum(policy.kept_pages(n, shape) for n in lengths), sum(map(policy.window_pages, lengths))
        return MemoryReport(
            pool_bytes=policy.pool_bytes(shape, pages),
            exact_bytes=policy.exact_bytes(shape, len(lengths)),
            window_bytes=window_pages * policy.window_page_bytes(shape),
            pages=pages,
            live_tokens=sum(map(self._live_tokens, lengths)),
            window_pages=window_pages,
        )

    def _live_tokens(self, length: int) -> int:
        if self._keeps_heavy:
            return self.policy.kept_tokens(length, self.shape)
        return length - PAGE_TOKENS * len(self.policy.evicted_pages(length, self.shape))

    def corrupt_key_scale(self, factor: float) -> None:
        for layer in self.storages:
            for side, storage in layer.items():
                storage.gain = storage.gain * factor if side.is_key else storage.gain

    def _plan(self, spans: Sequence[Span]) -> list[Block]:
        row_bytes = 4 * self.model.config.num_attention_heads * spans[-1].end
        return plan_blocks(self.policy, spans, row_bytes, set(self.shape.windows) or {None}, self.device)

    def _hidden(
        self, ids: Sequence[Sequence[int]], positions: Tensor, views: Sequence[View], *, checked: bool = True
    ) -> Tensor:
        """Return the last layer's normalized hidden states, (B, S, hidden).

        Raises UserError if a key or value is not finite, unless `checked` is false. All layers' results are read at once, after
        the last layer, so that the host waits for a GPU only once.
        """
        ids_BS, finite = torch.tensor([list(row) for row in ids]).to(self.device), list[Tensor]()
        options = {"views": views, "prepare": self._llamacpp_preparation, "finite": finite if checked else None}
        with within_memory(self.device):
            hidden = hidden_states(self.model, ATTENTION, ids_BS, positions.to(self.device), **options)
            if checked:
                check_finite(torch.stack(finite).cpu().numpy())
        return hidden

    def _logits(self, hidden: Tensor) -> Logits:
        """Return the logits (B, S, V) of normalized hidden states (B, S, hidden)."""
        with within_memory(self.device):
            logits: Logits = head(self.model, hidden).cpu().numpy()
        return logits


def llamacpp_preparation(config: Any, storages: Sequence[LayerStorage]) -> Preparation | None:
    """Return llama.cpp's transformation of queries and keys; None if no layer's keys have a llama.cpp block type."""
    forms = [layer[Side.KEY].form for layer in storages]
    if not any(form.code.dynamic_group for form in forms):
        return None

    def prepare(layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        form = forms[layer]
        if not form.code.dynamic_group:
            return query, key
        places = channel_order(str(config.model_type), key.shape[-1], key.device)
        return rotate(round_queries(rotate(query[..., places], form)), form), key[..., places]

    return prepare


def channel_order(model_type: str, head_dim: int, device: torch.device) -> Tensor:
    """Return, for each channel of llama.cpp's heads, the index of transformers' channel.

    For some models, llama.cpp's rotary embedding pairs neighbouring channels, and transformers' pairs the two halves.
    """
    places = torch.arange(head_dim, device=device)
    return places.view(2, -1).T.flatten() if pairs_neighbours(model_type) else places
