"""backend=torch on a GPU: transformers' own model, in float32, whose decoding attends through the Triton kernels.

Shapes: L layers, B sequences of a step, Hq query heads, H KV heads, S tokens of a chunk, T cached tokens, D head_dim.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipeline.core.checkpoint import inspect_checkpoint
from pipeline.core.kv import KVPolicy, KVScales, KVShape, Side
from pipeline.core.records import PREFILL_CHUNK, MemoryReport, StoredCopy
from plugins.kv_attention import ops
from plugins.kv_attention.layout import CacheLayout
from stages.checkpoints import load_causal_lm
from stages.engines.base import ChunkedEngine, Logits, check_positive, not_finite
from stages.engines.cuda.cache import KernelCache
from stages.engines.cuda.device import resolve_device
from stages.engines.oracle.build import open_bundle
from stages.engines.oracle.model import hidden_states, refuse_options, scales_for, shape_for
from stages.engines.paged.kernel_layout import check_kernels

ATTENTION = "kvgate_kernels"

SCORE_BYTES = 1 << 28
"""Bound of the scores of one block of rows in prefill."""

WARM_UP = 2
"""Runs before a capture: kernels are compiled and libraries initialized, neither of which may happen inside one."""


def load_engine(bundle: Path, *, threads: int, prefill_chunk: int = PREFILL_CHUNK) -> "KernelEngine":
    """Load a bundle of backend=torch onto the current GPU.

    Args:
        bundle: The bundle's directory.
        threads: Threads of all of torch in this process.
        prefill_chunk: Tokens of one prefill run.

    Raises:
        UserError: when a file is missing or was altered, and for a policy that the kernels do not hold.
        MissingRequirement: without a GPU, a CUDA build of torch, or Triton.
    """
    check_positive(threads=threads, prefill_chunk=prefill_chunk)
    device = resolve_device("cuda")
    policy, scales = open_bundle(bundle)
    info = inspect_checkpoint(bundle)
    check_kernels(policy, info.shape, info.q_heads)
    torch.set_num_threads(threads)
    return KernelEngine.from_model(
        load_causal_lm(bundle, dtype=torch.float32).to(device), policy, scales, prefill_chunk=prefill_chunk
    )


class Pass(Protocol):
    """One forward pass of the model, which collects the new keys and values of every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with query (B, Hq, S, D), key and value (B, H, S, D) of the new tokens: (B, S, Hq, D)."""
        ...


class DecodePass:
    """One token of each of `batch` sequences. All it reads and writes has a fixed address; on a GPU it is a CUDA graph.

    Queries, keys and values go into the kernels as the float32 that the model computes, not as float16: the kernels take such a
    query as two float16 terms, 22 of its 24 bits, and return float32. So only the rounding of softmax weights and the order of
    sums differ from the oracle, at the price of one more small matrix product a tile.
    """

    def __init__(self, model: Any, cache: KernelCache, shape: KVShape, batch: int) -> None:
        self.model, self.cache, self.batch = model, cache, batch
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=cache.device)
        new = (shape.layers, batch, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(new, device=cache.device)
        self.values = torch.zeros(new, device=cache.device)
        self.logits: Tensor
        """(batch, vocab_size)."""
        self.finite: Tensor
        """(L, 2, batch): whether all new keys, and all new values, fit float16."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._plans: dict[int, dict[str, Tensor]] = {}
        """The work list of this step, by the number of programs that fill the GPU with a layer's kernel."""

    def capture(self, pool: Any) -> None:
        """Capture `run` into a CUDA graph, which takes its memory from `pool`. The tables must be filled."""
        warm_up = torch.cuda.Stream(self.cache.device)  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(warm_up):
            for _ in range(WARM_UP):
                self._forward()
        torch.cuda.current_stream(self.cache.device).wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._forward()
        self._graph = graph

    def run(self) -> None:
        """Fill `logits`, `finite`, `keys` and `values` for the tokens `ids` of the sequences in the cache's tables."""
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        group, i = self.cache.places[layer]
        self.keys[layer].copy_(key[:, :, 0])
        self.values[layer].copy_(value[:, :, 0])
        out: Tensor = ops.decode_attention(
            query[:, :, 0].contiguous(),
            self.keys[layer],
            self.values[layer],
            page_table=self.cache.page_table[: self.batch],
            lengths=self.cache.lengths[: self.batch],
            exact_slots=self.cache.exact_slots[: self.batch] if group.exact else None,
            sink_tokens=group.layout.sink_tokens,
            scaling=scaling,
            **self._plan(group.layout, query[:, :, 0], scaling),
            **group.to_read(i),
        )
        return out.unsqueeze(1)

    def _plan(self, layout: CacheLayout, query: Tensor, scaling: float) -> dict[str, Tensor]:
        """The work list of this step, which the first layer of those that share it makes: exact tokens are the policy's."""
        page_table, lengths = self.cache.page_table[: self.batch], self.cache.lengths[: self.batch]
        programs = ops.default_programs(layout, query, page_table, scaling)
        if programs not in self._plans:
            work, sequences = ops.plan(lengths, programs, layout.sink_tokens, layout.recent_tokens)
            self._plans[programs] = {"work": work, "sequences": sequences}
        return self._plans[programs]

    def _forward(self) -> None:
        self._plans = {}
        positions = self.cache.lengths[: self.batch, None].long()
        hidden = hidden_states(self.model, ATTENTION, self.ids, positions, step=self)
        self.logits = self.model.lm_head(hidden[:, -1])
        self.finite = _fits(self.keys, self.values)


class PrefillPass:
    """A chunk of one sequence: exact causal attention within it, over the dequantized cache of the tokens before."""

    def __init__(self, model: Any, cache: KernelCache, handle: int) -> None:
        self.model, self.cache, self.handle = model, cache, handle
        self.new: list[tuple[Tensor, Tensor]] = []
        """(S, H, D) of each layer."""

    def run(self, tokens: Sequence[int]) -> Tensor:
        """Append `tokens` to the sequence and return the logits (vocab_size,) of the last.

        Raises UserError, and appends nothing, for keys or values that are not finite.
        """
        start = self.cache.length(self.handle)
        ids = torch.tensor([list(tokens)], device=self.cache.device)
        positions = torch.arange(start, start + len(tokens), device=self.cache.device)[None]
        hidden = hidden_states(self.model, ATTENTION, ids, positions, step=self)
        keys, values = (torch.stack(layers) for layers in zip(*self.new, strict=True))
        _refuse_not_finite(_fits(keys, values), [(self.handle, start + n) for n in range(len(tokens))])
        self.cache.extend(self.handle, keys, values)
        logits: Tensor = self.model.lm_head(hidden[0, -1])
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.new.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        past_key, past_value = self.cache.read(self.handle, layer)
        keys, values = torch.cat([past_key, key[0]], 1)[None], torch.cat([past_value, value[0]], 1)[None]
        heads, tokens = query.shape[1:3]
        start, total = past_key.shape[1], keys.shape[2]
        rows = max(1, SCORE_BYTES // (4 * heads * total))
        out = torch.empty_like(query)
        for low in range(0, tokens, rows):
            high = min(low + rows, tokens)
            column = torch.arange(start + high, device=query.device)
            mask = column <= torch.arange(start + low, start + high, device=query.device)[:, None]
            out[:, :, low:high] = scaled_dot_product_attention(
                query[:, :, low:high],
                keys[:, :, : start + high],
                values[:, :, : start + high],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
        return out.transpose(1, 2)


class KernelEngine(ChunkedEngine):
    """pipeline.core.records.Engine over the attention kernels.

    It has no `forced` on purpose: forced decode of a whole sequence at once would bypass the kernels. Step by step it runs
    through the kernels that are judged.
    """

    def __init__(self, model: Any, policy: KVPolicy, shape: KVShape, cache: KernelCache, chunk: int) -> None:
        super().__init__(policy, shape, int(model.config.vocab_size), chunk)
        self.model, self.cache = model, cache
        self._passes: dict[int, DecodePass] = {}
        """By padded batch size."""
        self._captured_moves = -1
        """`cache.moves` when the passes were captured."""
        self._pool: Any = None
        """Memory that the captured graphs share: no graph runs while the outputs of another are still needed."""

    @classmethod
    def from_model(
        cls, model: Any, policy: KVPolicy, scales: KVScales | None = None, *, prefill_chunk: int = PREFILL_CHUNK
    ) -> Self:
        """Return an engine around transformers' causal language model in float32.

        Args:
            model: The model, on a GPU, or on a CPU in a process whose kernels are interpreted (TRITON_INTERPRET=1).
            policy: How the cache is stored.
            scales: Its static scales; None when no side of the policy is static.
            prefill_chunk: Tokens of one prefill run.

        Raises:
            UserError: Policy, scales and model do not fit together, or the kernels do not hold the policy.
        """
        shape = shape_for(model, policy)
        layouts = check_kernels(policy, shape, model.config.num_attention_heads)
        cache = KernelCache(layouts, scales_for(policy, shape, scales), model.device)
        return cls(model.eval(), policy, shape, cache, prefill_chunk)

    @torch.inference_mode()
    def _start(self) -> int:
        return self.cache.start()

    @torch.inference_mode()
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        self.cache.reserve([sequence], len(prompt))
        for chunk in self._chunks(prompt):
            logits = PrefillPass(self.model, self.cache, sequence).run(chunk)
        last: Logits = logits.cpu().numpy()
        return last

    @torch.inference_mode()
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        batch = len(sequences)
        self.cache.reserve(sequences, 1)
        padded = 1 << (batch - 1).bit_length()
        self.cache.fill_tables(sequences, padded)
        step = self._pass(padded)
        step.ids[:batch, 0] = torch.tensor(tokens)
        step.run()
        # The host checks before anything is stored: a refused token would overwrite a recent one that is still needed.
        _refuse_not_finite(step.finite[..., :batch], [(handle, self.cache.length(handle)) for handle in sequences])
        self.cache.append(sequences, step.keys[:, :batch], step.values[:, :batch])
        logits: Logits = step.logits[:batch].cpu().numpy()
        return logits

    def _release(self, sequence: int) -> None:
        self.cache.release(sequence)

    def memory(self) -> MemoryReport:
        return self.cache.memory()

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        """Return what a sequence's pages hold, and the static scales that attention reads it with."""
        return [self.cache.stored(sequence, layer) for layer in range(self.shape.layers)]

    def corrupt_key_scale(self, factor: float) -> None:
        self.corrupt_scale(Side.KEY, factor)

    def corrupt_scale(self, side: Side, factor: float, layer: int | None = None, head: int | None = None) -> None:
        """See pipeline.core.records.CorruptibleEngine: of stored and of later tokens; the codes stay right."""
        with torch.inference_mode():
            self.cache.corrupt_scale(side, factor, layer, head)

    def repeat_page(self) -> None:
        """See pipeline.core.records.CorruptibleEngine."""
        with torch.inference_mode():
            self.cache.repeat_page()

    def _pass(self, batch: int) -> DecodePass:
        """The pass for `batch` sequences. Passes that were captured with old addresses are dropped."""
        if self._captured_moves != self.cache.moves:
            self._passes, self._captured_moves = {}, self.cache.moves
            self._pool = torch.cuda.graph_pool_handle() if self.cache.device.type == "cuda" else None
        if batch not in self._passes:
            step = DecodePass(self.model, self.cache, self.shape, batch)
            if self.cache.device.type == "cuda":
                step.capture(self._pool)
            self._passes[batch] = step
        return self._passes[batch]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    *,
    step: Pass,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, Hq, S, D), key and value (B, H, S, D) -> (B, S, Hq, D).

    `step` travels through the model's forward as a keyword argument. transformers computes no mask for an attention that has
    registered none.
    """
    refuse_options(module, options)
    return step.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)


def _fits(keys: Tensor, values: Tensor) -> Tensor:
    """Whether all keys, and all values, of a row are finite as float16: (L, n, H, D) each -> (L, 2, n)."""
    return torch.stack([torch.isfinite(x.half()).flatten(2).all(-1) for x in (keys, values)], 1)


def _refuse_not_finite(fits: Tensor, rows: Sequence[tuple[int, int]]) -> None:
    """Raise UserError for the first row of `fits` (L, 2, n) that is false; `rows` are their sequences and positions.

    The lowest layer comes first: what is not finite there makes the layers above not finite either.
    """
    host = fits.cpu()
    if not host.all():
        layer, side, row = (~host).nonzero()[0].tolist()
        handle, position = rows[row]
        raise not_finite(("key", "value")[side], layer, position, f"sequence {handle}")
