"""Faults of backend=torch: in its cache, or only in the pass that is scored."""

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


of = partial(Fault, "reference")

FAULTS = [
    of("torch_rows_swapped", "two rows of a batch read each other's cache", method("_hidden", rows_swapped)),
    of("torch_scored_unquantized", "the pass that is scored does not quantize; int4_tensor would rank first",
       method("forced", unquantized)),
]  # fmt: skip
