"""Faults of computing: positions, slots of exact tokens, turns, the compiled attention kernel, and `backend=torch`."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from faults.hooks import Fault, Plant, add, given, method, sound, write, zero
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native import compiler
from stages.engines.reference.cache import Storage
from stages.policies.arithmetic_torch import Stored

NATIVE = Path(compiler.__file__).parent


def ring(edit: Any) -> Plant:
    """Write exact tokens into other slots than decoding reads: `edit(slots, sinks, recent)`."""

    def faulty(places: Any, engine: Any, *arguments: Any) -> Any:
        pool = engine.pool
        placed = places(*arguments)
        sizes = pool.policy.sink_tokens, pool.policy.recent_tokens
        if pool.buffers in placed:
            placed[pool.buffers] = [(tokens, buffers, edit(slots, *sizes)) for tokens, buffers, slots in placed[pool.buffers]]
        return placed

    return method("pool.places", faulty)


def rows_swapped(hidden: Any, _: Any, ids: Any, positions: Tensor, views: list[Any], *given: Any) -> Any:
    """Let two rows of a batch read each other's cache."""
    if len(views) > 1 and views[0].caches[0].length == views[1].caches[0].length:
        views[0].caches, views[1].caches = views[1].caches, views[0].caches
    return hidden(ids, positions, views, *given)


def unquantized(compute: Any, engine: Any, *given: Any) -> Any:
    """Let the one pass read exact keys and values, while decoding reads the codes."""
    kept = engine.storages
    engine.storages = [{side: UnquantizedStorage(s.form, s.static) for side, s in layer.items()} for layer in kept]
    found = compute(*given)
    engine.storages = kept
    return found


class UnquantizedStorage(Storage):
    """A storage that does not quantize."""

    def write(self, x: Tensor) -> Stored:
        return Stored(x, None, None)

    def read(self, stored: Stored) -> Tensor:
        return stored.codes * self.gain


def kernel(before: str, after: str) -> Callable[[], AbstractContextManager[None]]:
    """Compile the kernel with the text `before`, which must occur exactly once in the sources, replaced by `after`."""

    def compiled(folder: str, head_dim: int, group: int) -> Path:
        texts = {name: (NATIVE / name).read_text(encoding="utf-8") for name in compiler.SOURCES}
        places = sum(text.count(before) for text in texts.values())
        assert places == 1, f"the kernel has {places} places like {before!r}"
        for name, text in texts.items():
            (Path(folder) / name).write_text(text.replace(before, after), encoding="utf-8")
        flags = [flag.replace("-O3", "-O1") for flag in compiler.FLAGS]  # compiles in a third of the time
        sizes, out = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"), Path(folder) / "mutant.so"
        options = [*flags, *sizes, str(Path(folder) / compiler.SOURCES[0])]
        subprocess.run([*compiler.require_compiler().command, *options, "-o", str(out), "-lm"], check=True)
        return out

    @contextmanager
    def loads() -> Iterator[None]:
        with TemporaryDirectory() as folder, patch.object(onnx_engine, "compiled_kernel", partial(compiled, folder)):
            yield

    return loads


def mutant(name: str, models: str, before: str, after: str) -> Fault:
    """Return a fault: a kernel with one place changed."""
    return Fault("kernels", name, models, sound, kernel(before, after))


position, turn, reference = (partial(Fault, kind) for kind in ("positions", "turns", "reference"))

FAULTS = [
    position("after_330_decoded", "nothing is stored from the 330th decoded token on",
             write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 330)[:, None])),
    position("ring_never_wraps", "tokens that come round the ring stay in its last slot",
             ring(lambda slots, sink, recent: np.where(slots == sink, sink + recent - 1, slots))),
    turn("second_turn_one_early", "the second turn of a conversation is rotated one position early",
         given("position_ids", add(-1), lambda s: (s.chunks > 1)[:, None], "prefill")),
    turn("turn_over_a_page_border", "a turn that crosses a page's end loses what lies beyond it",
         write("value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None]
               & (s.positions // 64 > s.lengths[:, None] // 64), layers=[1])),
    reference("torch_rows_swapped", "two rows of a batch read each other's cache", method("_hidden", rows_swapped)),
    reference("torch_scored_unquantized", "the pass that is scored does not quantize; int4_tensor would rank first",
              method("forced", unquantized)),
    mutant("mask_one_too_many", "the mask lets one token too many in",
           "(lanes + t < page->last)", "(lanes + t <= page->last)"),
    mutant("chunk_reads_head_0", "a later chunk reads every head's cache from head 0",
           "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
]  # fmt: skip
