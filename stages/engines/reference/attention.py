"""Attention in which each row reads its own selection of forms; one code path for prefill, decode and whole sequences.

A row is a query; `start` is the length of the cache when the row's chunk began. In order of position, row i attends to:
1. float16 sinks, 2. base codes (with a gap if the policy evicts), 3. the window's codes, 4. float16 recent tokens, 5. the exact
tokens of its own chunk up to itself. A sliding-window layer drops all columns before its own window; do not confuse that window
with the policy's window of finer formats. The borders of these sources never decrease with i. So all rows of a block read
nearly every column from the same source, and only narrow bands need a mask. Blocks bound the memory: nothing is quadratic in
the number of tokens.

Shapes: Hq query heads, H KV heads, G = Hq / H, S new tokens, R rows of a block, T columns (positions), D head_dim.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from stages.engines.reference.formats import CPU
from stages.engines.reference.model import LayerAttention, no_mask, options_of
from stages.policies.policy import PAGE_TOKENS, KVPolicy

ATTENTION = "kvgate_reference"

BLOCK_ROWS = 64
"""Maximum rows of a block. Small blocks waste less work on masked columns; large blocks give larger matrix products."""

BLOCK_BYTES = 1 << 24
"""Maximum bytes of a block's scores. Long contexts get fewer rows per block."""

GPU_BLOCK_ROWS, GPU_BLOCK_BYTES = 256, 1 << 28
"""Limits on a GPU, which needs larger matrix products to stay busy."""

SMALLEST_EXPONENT = -80.0
"""Floor of the softmax's exponents: e**-80 is a normal float32."""


class Sources(NamedTuple):
    """A sequence's keys or values (H, T, D) in every form that rows read; None if no row reads the form."""

    exact: Tensor | None
    """Rounded to float16: sinks and recent tokens."""
    base: Tensor
    window: Tensor | None
    """In the finer format of the policy's window."""
    chunk: Tensor
    """As computed: the tokens of a row's own chunk."""


EVICTED = "evicted"
"""Marks columns that the masked rows do not attend to, because of eviction or a sliding window."""
PARTS = (EVICTED, "exact", "base", EVICTED, "base", "window", "exact", "chunk")
"""Sources in the order of a row's columns."""


@dataclass(frozen=True)
class Span:
    """Consecutive rows [begin, end) of a sequence.

    If `start` is a number, the rows are a prefilled chunk that follows `start` cached tokens. If `start` is None, the rows are
    tokens that were decoded one by one.
    """

    begin: int
    end: int
    start: int | None
    itself: bool = False
    """Whether each row reads all tokens from the cache, its own included."""

    @property
    def starts(self) -> Tensor:
        """For each row, the length of the cache that it reads."""
        row = torch.arange(self.begin, self.end)
        return row + 1 if self.itself else row if self.start is None else torch.full_like(row, self.start)


@dataclass(frozen=True)
class Fed:
    """A sequence and how an engine was fed with it: pieces of (number of tokens, whether they were decoded one by one)."""

    tokens: Sequence[int]
    pieces: Sequence[tuple[int, bool]]

    @property
    def rows(self) -> list[int]:
        """Positions whose logits an engine returns: the last token of a prefilled piece, and every decoded token."""
        ends = list(accumulate(count for count, _ in self.pieces))
        return [
            position
            for end, (count, decoded) in zip(ends, self.pieces, strict=True)
            for position in (range(end - count, end) if decoded else (end - 1,))
        ]

    def spans(self, chunk: int, *, itself: bool, begin: int = 0) -> list[Span]:
        """Return the spans from position `begin` on, with prefilled pieces cut into chunks of `chunk` tokens.

        A chunk or a decoded token must begin at `begin`. `itself` is passed on to every span.
        """
        spans, first = [], 0
        for count, decoded in self.pieces:
            end = first + count
            starts = () if decoded else range(first, end, chunk)
            spans += [Span(begin, min(begin + chunk, end), begin, itself) for begin in starts]
            if decoded:
                spans.append(Span(first, end, None, itself))
            first = end
        return [replace(span, begin=max(begin, span.begin)) for span in spans if span.end > begin]


@dataclass(frozen=True)
class AttentionPiece:
    """Columns [low, high) of one source, and the rows that attend to them (`mask_RT`; None means all rows).

    For source EVICTED, the mask selects the rows that do not attend.
    """

    source: str
    """Field of `Sources`, or EVICTED."""
    low: int
    high: int
    mask_RT: Tensor | None


@dataclass(frozen=True)
class Block:
    """Rows [begin, end), and the columns that they attend to."""

    begin: int
    end: int
    pieces: Mapping[tuple[int | None, bool], tuple[AttentionPiece, ...]]
    """Pieces by (the layer's sliding window or None, whether the side has finer copies in the policy's window)."""


Preparation = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function (layer, queries, keys), each (..., D), that returns the queries and keys as the judged engine uses them."""


class View(Protocol):
    """Access of one sequence of a batch to its cached tokens."""

    def attend(self, layer: int, q: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        """Return the attention (H, G, S, D) of new tokens: scaled queries q (H, G, S, D), keys and values (H, S, D)."""
        ...


@dataclass(frozen=True)
class ConcatenatedViews:
    """Several sequences concatenated in one row of a batch, without padding."""

    views: Sequence[View]
    lengths: Sequence[int]

    def attend(self, layer: int, q: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        parts = zip(self.views, *(torch.split(x, list(self.lengths), dim=-2) for x in (q, key, value)), strict=True)
        return torch.cat([view.attend(layer, *part, options) for view, *part in parts], dim=-2)


def plan_blocks(
    policy: KVPolicy,
    spans: Sequence[Span],
    row_bytes: int,
    slides: Collection[int | None] = (None,),
    device: torch.device = CPU,
) -> list[Block]:
    """Cut the rows of consecutive `spans` into blocks. Masks are computed on the CPU and moved to `device`."""
    most_rows, max_bytes = (BLOCK_ROWS, BLOCK_BYTES) if device.type == "cpu" else (GPU_BLOCK_ROWS, GPU_BLOCK_BYTES)
    size = max(1, min(most_rows, max_bytes // max(1, row_bytes)))
    all_rows = torch.arange(spans[0].begin, spans[-1].end)
    all_starts = torch.cat([span.starts for span in spans])
    return [
        Block(
            begin=int(row[0]),
            end=int(row[-1]) + 1,
            pieces={
                (slide, finer): tuple(_pieces(_borders(policy, row, starts, slide, finer), device))
                for slide in slides
                for finer in ((False,) if policy.window is None else (False, True))
            },
        )
        for row, starts in zip(torch.split(all_rows, size), torch.split(all_starts, size), strict=True)
    ]


def _borders(policy: KVPolicy, row: Tensor, starts: Tensor, slide: int | None, finer: bool) -> Tensor:
    """Return borders (9, R): row i reads columns borders[p, i] to borders[p + 1, i] - 1 from source PARTS[p].

    Example: columns of row 200, a decoded token, with 4 sinks, 2 recent tokens, a window of 64 and no eviction:

        evicted   exact   base   evicted   base    window    exact     chunk
        none      0-3     none   none      4-127   128-197   198-199   200
    """
    sinks = starts.clamp(max=policy.sink_tokens)
    recent = torch.maximum(starts - policy.recent_tokens, sinks)
    window = recent
    if finer and policy.window is not None:
        page = (starts - policy.window.tokens).clamp(min=0) // PAGE_TOKENS
        window = torch.minimum(torch.maximum(page * PAGE_TOKENS, sinks), recent)
    sinks_end, latest = sinks, sinks
    if policy.eviction is not None:
        page = (starts - policy.eviction.window_tokens).clamp(min=0) // PAGE_TOKENS
        sinks_end = torch.maximum((page * PAGE_TOKENS).clamp(max=policy.eviction.sink_tokens), sinks)
        latest = torch.maximum(page * PAGE_TOKENS, sinks_end)
    none = torch.zeros_like(row)
    # transformers' sliding_window_overlay: a row attends to position p if p > row - window.
    low = none if slide is None else (row + 1 - slide).clamp(min=0)
    borders = [torch.maximum(border, low) for border in (none, sinks, sinks_end, latest, window, recent, starts, row + 1)]
    return torch.stack([none, *borders])


def _pieces(borders: Tensor, device: torch.device) -> Iterator[AttentionPiece]:
    for part, source in enumerate(PARTS):
        low, high = borders[part], borders[part + 1]
        bands: tuple[tuple[int, int], ...]
        begin, last_low, first_high, end = int(low[0]), int(low[-1]), int(high[0]), int(high[-1])
        if last_low < first_high:  # all rows read these columns; only some rows read the two bands
            bands = ((begin, last_low), (first_high, end))
            yield AttentionPiece(source, last_low, first_high, None)
        else:
            bands = ((begin, end),)
        for a, b in bands:
            column = torch.arange(a, b)
            mask = (column >= low[:, None]) & (column < high[:, None])
            columns = mask.any(0).nonzero().flatten().tolist()
            if columns:  # a layer's own window may push both borders of some rows beyond the source's last token
                yield AttentionPiece(
                    source, a + columns[0], a + columns[-1] + 1, mask[:, columns[0] : columns[-1] + 1].to(device)
                )


def attend(
    q: Tensor,
    keys: Sources,
    values: Sources,
    key_pieces: Sequence[AttentionPiece],
    value_pieces: Sequence[AttentionPiece],
    options: LayerAttention = LayerAttention(),  # noqa: B008  (immutable)
) -> Tensor:
    """Return the attention (H, G, R, D) of scaled queries q (H, G, R, D). The last column belongs to the last query."""
    heads, groups, rows, head_dim = q.shape
    flat = q.reshape(heads, groups * rows, head_dim)
    columns = max(piece.high for piece in key_pieces)
    scores = q.new_empty(heads, groups * rows, columns)
    by_row = scores.view(heads, groups, rows, columns)
    # No piece covers the later tokens of the rows' chunk: they stay masked.
    by_row[..., columns - rows :] = -torch.inf
    for piece in key_pieces:
        if piece.source == EVICTED:
            evicted = by_row[..., piece.low : piece.high]
            if piece.mask_RT is None:
                evicted.fill_(-torch.inf)
            else:
                evicted.masked_fill_(piece.mask_RT, -torch.inf)
            continue
        k = _read(keys, piece, q.dtype).transpose(1, 2)
        if piece.mask_RT is None:
            options.cap(torch.matmul(flat, k, out=scores[..., piece.low : piece.high]))
        else:
            columns_of_piece = by_row[..., piece.low : piece.high]
            products = options.cap(torch.matmul(flat, k)).view(columns_of_piece.shape)
            columns_of_piece.copy_(torch.where(piece.mask_RT, products, columns_of_piece))
    # Softmax, normalized at the end. Weights at the floor are negligible compared with 1. Without the floor, denormal weights
    # would make the products below thirty times slower on a CPU.
    highest = scores.amax(-1, keepdim=True)
    if options.sinks is not None:
        sinks = options.sinks.repeat_interleave(rows, dim=1)[..., None].to(q.dtype)
        highest = torch.maximum(highest, sinks)
    weights = scores.sub_(highest).clamp_(min=SMALLEST_EXPONENT).exp_()
    out = torch.zeros_like(flat)
    for piece in value_pieces:
        if piece.source == EVICTED:
            continue
        weight = weights[..., piece.low : piece.high]
        if piece.mask_RT is not None:
            weight = (weight.view(heads, groups, rows, -1) * piece.mask_RT).flatten(1, 2)
        out += torch.matmul(weight, _read(values, piece, q.dtype))
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + (sinks - highest).exp()
    return (out / total).view(q.shape)


def _read(sources: Sources, piece: AttentionPiece, dtype: torch.dtype) -> Tensor:
    states: Tensor = getattr(sources, piece.source)
    return states[:, piece.low : piece.high].to(dtype)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    *,
    views: Sequence[View],
    prepare: Preparation | None = None,
    finite: list[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query (B, Hq, S, D), key and value (B, H, S, D) -> (B, S, Hq, D).

    `views` has one view per row of the batch. `finite` receives, for every layer, whether its keys and its values are finite as
    float16 (2).
    """
    if finite is not None:
        finite.append(torch.stack([torch.isfinite(x.half()).all() for x in (key, value)]))
    if prepare is not None:
        query, key = prepare(int(module.layer_idx), query, key)  # type: ignore[arg-type]
    batch, _, length, head_dim = query.shape
    heads = key.shape[1]
    layer_options = options_of(module, heads, options)
    q = query.view(batch, heads, -1, length, head_dim) * scaling
    out = torch.empty_like(q)
    for b, view in enumerate(views):
        out[b] = view.attend(int(module.layer_idx), q[b], key[b], value[b], layer_options)  # type: ignore[arg-type]
    return out.flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, no_mask)
