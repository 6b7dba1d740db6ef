"""backend=torch on a CPU: faults of the reference cache, of its pages alone, and of the one pass that scores it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faults.fault import Fault
from pipeline.core.kv import PAGE_TOKENS
from pipeline.formats.oracle import Stored
from stages.engines.oracle.cache import Storage


def on_pages(engine: Any, edit: Callable[[Any, Tensor], Tensor]) -> None:
    """Change what is appended to the pages of every sequence, x (H, S, D); one pass has no pages."""
    start = engine._start

    def faulty() -> int:
        handle: int = start()
        for cache in engine.sequences[handle]:
            for pages in cache.pages.values():
                pages.append = _editing(pages, edit)
        return handle

    engine._start = faulty


def _editing(pages: Any, edit: Callable[[Any, Tensor], Tensor]) -> Callable[[Tensor], None]:
    append = pages.append
    return lambda x: append(edit(pages, x))


def page_end_unwritten(engine: Any) -> None:
    def edit(pages: Any, x: Tensor) -> Tensor:
        positions = pages.length + torch.arange(x.shape[1])
        return torch.where((positions % PAGE_TOKENS == PAGE_TOKENS - 1)[:, None], 0.0, x)

    on_pages(engine, edit)


def rows_swapped(engine: Any) -> None:
    """Two rows of a batch read each other's cache."""
    hidden = engine._hidden

    def faulty(ids: Sequence[Sequence[int]], positions: Tensor, views: list[Any]) -> Tensor:
        if len(views) > 1 and views[0].caches[0].length == views[1].caches[0].length:
            views[0].caches, views[1].caches = views[1].caches, views[0].caches
        out: Tensor = hidden(ids, positions, views)
        return out

    engine._hidden = faulty


def decoded_one_late(engine: Any) -> None:
    """A decode step rotates by the next position; one pass does not."""
    decode, hidden = engine._decode, engine._hidden
    late = False

    def faulty_hidden(ids: Sequence[Sequence[int]], positions: Tensor, views: list[Any]) -> Tensor:
        out: Tensor = hidden(ids, positions + int(late), views)
        return out

    def faulty(sequences: Sequence[int], tokens: Sequence[int]) -> Any:
        nonlocal late
        late = True
        try:
            return decode(sequences, tokens)
        finally:
            late = False

    engine._hidden, engine._decode = faulty_hidden, faulty


def one_pass_unquantized(engine: Any) -> None:
    """What scores the engine reads exact keys and values; what serves reads the codes."""
    forced = engine._forced

    def faulty(tokens: Sequence[int], first: int) -> Any:
        kept = engine.storages
        exact = [{side: Exact(s.form, s.static) for side, s in layer.items()} for layer in kept]
        engine.storages = exact
        try:
            return forced(tokens, first)
        finally:
            engine.storages = kept

    engine._forced = faulty


@dataclass(frozen=True)
class Exact(Storage):
    """Keeps numbers as they are."""

    def write(self, x: Tensor) -> Stored:
        return Stored(x, None, None)

    def read(self, stored: Stored, gain: Tensor | None = None) -> Tensor:
        return stored.codes if gain is None else stored.codes * gain


KIND = "oracle"

FAULTS = [
    Fault("torch_page_end_unwritten", KIND, "the last token of every page is lost; one pass has no pages", "int8",
          page_end_unwritten, engine="torch"),
    Fault("torch_rows_swapped", KIND, "two rows of a batch read each other's cache", "int8", rows_swapped, engine="torch"),
    Fault("torch_decode_one_late", KIND, "decode rotates one position late; one pass does not", "int8", decoded_one_late,
          engine="torch"),
    Fault("torch_scored_unquantized", KIND, "the pass that is scored does not quantize; int4_tensor would rank first",
          "int4_tensor", one_pass_unquantized, engine="torch"),
]  # fmt: skip
