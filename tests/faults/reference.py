"""Faults of backend=torch on a CPU: in the reference cache, only in its pages, or in the one-pass scoring."""

from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from faults.fault import Fault
from faults.hooks import method
from stages.engines.reference.cache import Storage
from stages.policies.arithmetic_torch import Stored


def rows_swapped(hidden: Any, _: Any, ids: Any, positions: Tensor, views: list[Any], *given: Any) -> Any:
    """Let two rows of a batch read each other's cache."""
    if len(views) > 1 and views[0].caches[0].length == views[1].caches[0].length:
        views[0].caches, views[1].caches = views[1].caches, views[0].caches
    return hidden(ids, positions, views, *given)


def unquantized(compute: Any, engine: Any, *given: Any, **options: Any) -> Any:
    """Let one method read exact keys and values, while the other methods read the codes."""
    with exact_storages(engine):
        return compute(*given, **options)


@contextmanager
def exact_storages(engine: Any) -> Any:
    kept = engine.storages
    engine.storages = [{side: UnquantizedStorage(s.form, s.static) for side, s in layer.items()} for layer in kept]
    yield
    engine.storages = kept


class UnquantizedStorage(Storage):
    """A storage that does not quantize."""

    def write(self, x: Tensor) -> Stored:
        return Stored(x, None, None)

    def read(self, stored: Stored) -> Tensor:
        return stored.codes * self.gain


of = partial(Fault, "reference", engine="torch")

FAULTS = [
    of("torch_rows_swapped", "int8", "two rows of a batch read each other's cache", method("_hidden", rows_swapped)),
    of("torch_scored_unquantized", "int4_tensor", "the pass that is scored does not quantize; int4_tensor would rank first",
       method("forced", unquantized), "conformance"),
    of("torch_generate_unquantized", "int4_tensor", "generate does not quantize; int4_tensor would answer best",
       method("generate", unquantized), "free_answers"),
]  # fmt: skip
