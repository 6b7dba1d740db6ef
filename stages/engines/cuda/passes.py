"""The two forward passes of backend=torch on a GPU, and the attention function through which transformers calls them.

Shapes: L layers, B sequences of a step, Hq query heads, H KV heads, S new tokens, D head_dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface

from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout
from stages.engines.base import check_finite
from stages.engines.cuda.cache import KernelCache
from stages.engines.interface import Logits
from stages.engines.paged.sequences import PagedSequence
from stages.engines.reference.model import head, hidden_states, refuse_options
from stages.engines.staging import StagedInputs, StepResults
from stages.policies.policy import PAGE_TOKENS, KVShape, page_count

Indices = npt.NDArray[np.int64]
ATTENTION = "kvgate_kernels"

WARM_UP = 2
"""Number of runs before a capture. They compile kernels and initialize libraries, which is not allowed in a capture."""


class DecodePass:
    """A decode step of at most `batch` sequences, which is captured as one CUDA graph on a GPU.

    The host fills one buffer before the step and waits once for the results afterwards. All buffers have fixed addresses.

    Queries, keys and values enter the kernels in the model's type. float32 is not rounded to float16: the kernels split a
    float32 query into two float16 terms, which keep 22 of its 24 bits, and return float32. Only the rounding of softmax weights
    and the order of sums then differ from the reference engine, at the cost of one more small matrix product per tile.
    """

    def __init__(self, model: Any, cache: KernelCache, shape: KVShape, batch: int) -> None:
        self.model, self.cache, self.batch = model, cache, batch
        row = (torch.int32, (batch,))
        sections = {"ids": row, "positions": row, "exact_slots": row, "page_table": (torch.int32, (batch, cache.columns))}
        self.inputs = StagedInputs(sections, cache.device)
        tensors = self.inputs.tensors
        tensors["positions"].fill_(-1)
        self.page_table, self.exact_slots = tensors["page_table"], tensors["exact_slots"]
        new = (shape.layers, batch, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(new, dtype=model.dtype, device=cache.device)
        """New keys (L, B, H, D), layers in the order of the cache's groups."""
        self.values = torch.zeros(new, dtype=model.dtype, device=cache.device)
        self._lengths: Tensor
        self._plans: dict[int, launch.DecodePlan] = {}
        """Work lists of this step by the number of programs that fill the GPU."""
        self._logits: Tensor
        """Logits (batch, vocab_size)."""
        self._finite: Tensor
        """Whether each layer's new keys, and its new values, are finite as float16: (L, 2)."""
        self._results: StepResults | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Capture `run` into a CUDA graph, which takes its memory from `pool`.

        All positions must still be -1, so that the warm-up runs append nothing. An append could overwrite needed tokens.
        """
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

    def put(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        """Fill the first rows with one token per sequence. The other rows get position -1, so they store nothing."""
        sequences, arrays = [self.cache.sequences[handle] for handle in handles], self.inputs.arrays
        batch = len(sequences)
        arrays["ids"][:batch] = tokens
        arrays["positions"][:batch] = [sequence.length for sequence in sequences]
        arrays["positions"][batch:] = -1
        arrays["exact_slots"][:batch] = [sequence.buffer for sequence in sequences]
        for row, sequence in zip(arrays["page_table"], sequences, strict=False):
            row[: len(sequence.pages)] = sequence.pages  # later columns are never read
        self.inputs.upload()

    def run(self) -> None:
        """Compute the step that `put` set up. Stores all its tokens, or none if a key or value is not finite."""
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def read(self) -> Logits:
        """Wait for the step; return its logits (batch, vocab_size). Raises UserError if a key or value is not finite."""
        if self._results is None or self._graph is None:
            self._results = StepResults(self._logits, self._finite)
        logits, finite = self._results.read()
        check_finite(self.cache.by_layer(finite))
        return logits.astype(np.float32)  # a copy

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        group, i = self.cache.places[layer]
        row = group.first + i
        self.keys[row].copy_(key[:, :, 0])
        self.values[row].copy_(value[:, :, 0])
        return launch.decode_attention(
            group.layout,
            query[:, :, 0],
            self.keys[row],
            self.values[row],
            group.attention_tensors(i),
            page_table=self.page_table,
            lengths=self._lengths,
            plan=self._plan(group.layout, query[:, :, 0], scaling),
            scaling=scaling,
            exact_slots=self.exact_slots,
        ).unsqueeze(1)

    def _plan(self, layout: CacheLayout, query: Tensor, scaling: float) -> launch.DecodePlan:
        """Return the step's work list. Layers with the same number of programs share it."""
        programs = launch.default_programs(layout, query, self.page_table, scaling)
        if programs not in self._plans:
            self._plans[programs] = launch.plan_decode(layout, self._lengths, programs=programs)
        return self._plans[programs]

    def _forward(self) -> None:
        positions = self.inputs.tensors["positions"]
        self._lengths = positions.clamp(min=0)
        self._plans = {}
        ids = self.inputs.tensors["ids"][:, None]
        hidden = hidden_states(self.model, ATTENTION, ids, self._lengths[:, None].long(), step=self)
        self._logits = head(self.model, hidden[:, -1:])[:, 0].float()
        self._finite = finite_as_float16(self.keys, self.values, positions)
        # A step stores all its tokens or none, because a refused token would overwrite a recent token that is still needed.
        stored = torch.where(self._finite.all(), positions, -1)
        self.cache.append(self.keys, self.values, self.page_table, stored, self.exact_slots)


class PrefillPass:
    """Chunks of several sequences in one pass: one row per token, sequences concatenated.

    The tokens of a chunk attend to each other exactly and causally, and to earlier tokens through the quantized cache. So a
    chunk of one token is a decode step of its sequence, in the same pass as joining prompts.
    """

    def __init__(self, model: Any, cache: KernelCache, shape: KVShape, chunks: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Prepare a pass over `chunks`: (handle, next tokens). Pages for the tokens must be reserved."""
        self.model, self.cache, self.chunks = model, cache, chunks
        sequences = [cache.sequences[handle] for handle, _ in chunks]
        batch, tokens = len(chunks), sum(len(chunk) for _, chunk in chunks)
        per_token, per_chunk = (torch.int32, (tokens,)), (torch.int32, (batch,))
        page_counts = [page_count(sequence.length) for sequence in sequences]
        self.inputs = StagedInputs(
            {
                "ids": per_token,
                "positions": per_token,
                "pages": (torch.int32, (tokens, 1)),
                "row_slots": per_token,
                "starts": (torch.int32, (batch + 1,)),
                "last": (torch.int64, (batch,)),
                "lengths": per_chunk,
                "exact_slots": per_chunk,
                "page_table": (torch.int32, (batch, max(1, *page_counts))),
            },
            cache.device,
        )
        arrays = self.inputs.arrays
        for b, (sequence, (_, chunk)) in enumerate(zip(sequences, chunks, strict=True)):
            begin = int(arrays["starts"][b])
            rows = slice(begin, begin + len(chunk))
            arrays["ids"][rows] = chunk
            arrays["positions"][rows], arrays["pages"][rows, 0], arrays["row_slots"][rows] = _append_rows(
                sequence, len(chunk), cache.recent_tokens
            )
            arrays["starts"][b + 1], arrays["last"][b] = rows.stop, rows.stop - 1
            arrays["lengths"][b], arrays["exact_slots"][b] = sequence.length, sequence.buffer
            arrays["page_table"][b, : page_counts[b]] = sequence.pages[: page_counts[b]]
        new = (shape.layers, tokens, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(new, dtype=model.dtype, device=cache.device)
        """New keys (L, tokens, H, D), layers in the order of the cache's groups."""
        self.values = torch.zeros(new, dtype=model.dtype, device=cache.device)

    def run(self) -> Logits:
        """Store the chunks and return the logits (chunks, vocab_size) of their last tokens.

        Raises UserError and stores nothing of any chunk if a key or value is not finite.
        """
        tensors = self.inputs.tensors
        self.inputs.upload()
        positions = tensors["positions"]
        hidden = hidden_states(self.model, ATTENTION, tensors["ids"][None], positions[None].long(), step=self)
        logits = head(self.model, hidden[:, tensors["last"]])[0].float()
        finite = finite_as_float16(self.keys, self.values, positions)
        stored = torch.where(finite.all(), positions, -1)
        self.cache.append(self.keys, self.values, tensors["pages"], stored, tensors["row_slots"])
        rows, flags = StepResults(logits, finite).read()
        check_finite(self.cache.by_layer(flags))
        for handle, chunk in self.chunks:
            self.cache.advance([handle], len(chunk))
        return rows.astype(np.float32, copy=False)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        group, i = self.cache.places[layer]
        row, tensors = group.first + i, self.inputs.tensors
        self.keys[row].copy_(key[0].transpose(0, 1))
        self.values[row].copy_(value[0].transpose(0, 1))
        return launch.context_attention(
            group.layout,
            query[0].transpose(0, 1),
            self.keys[row],
            self.values[row],
            group.attention_tensors(i),
            page_table=tensors["page_table"],
            lengths=tensors["lengths"],
            query_starts=tensors["starts"] if len(self.chunks) > 1 else None,
            scaling=scaling,
            exact_slots=tensors["exact_slots"],
        )[None]


def _append_rows(row: PagedSequence, tokens: int, recent_tokens: int) -> tuple[Indices, Indices, Indices]:
    """Return positions, pages and row slots of a sequence's next tokens, as the kernels' append expects them.

    A slot of the ring of recent tokens gets only its newest token. Earlier tokens get -1 - buffer, which keeps only sinks.
    """
    end = row.length + tokens
    positions = np.arange(row.length, end)
    first = row.length // PAGE_TOKENS
    pages = np.array(row.pages[first : page_count(end)])[positions // PAGE_TOKENS - first]
    return positions, pages, np.where(positions >= end - recent_tokens, row.buffer, -1 - row.buffer)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    *,
    step: DecodePass | PrefillPass,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query (B, Hq, S, D), key and value (B, H, S, D) -> (B, S, Hq, D).

    transformers computes no mask, since no mask function is registered under this name.
    """
    refuse_options(module, key.shape[1], options)
    return step.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)


def finite_as_float16(keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Return whether each layer's keys, and its values, (L, n, H, D) are finite as float16 in rows with a position: (L, 2)."""
    padding = positions < 0
    return torch.stack([(torch.isfinite(x.half()).flatten(2).all(-1) | padding).all(-1) for x in (keys, values)], 1)
