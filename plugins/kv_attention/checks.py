"""Checks of a launch's tensors: types, shapes, strides, addresses and devices, never contents."""

from collections.abc import Mapping
from typing import get_args

from torch import Tensor

from plugins.kv_attention.layout import CacheLayout, Dims, dimension_problem
from plugins.kv_attention.variants import Compute

ALIGNMENT = 16
"""Alignment in bytes of a page's rows and of a pool's address. The compiler relies on both."""

INT32 = ("int32",)
TensorSpec = tuple[tuple[str, ...], Dims]
"""Allowed types of a tensor, as torch names them, and its dimensions."""


def check_launch(
    layout: CacheLayout,
    tensors: Mapping[str, Tensor | None],
    cache: Mapping[str, Tensor],
    rows: str = "B",
    layers: tuple[str, ...] = (),
) -> None:
    """Check the tensors of a launch, by name; `key_new` and `lengths` are always present.

    `tensors`: all except the cache's; None if absent. `cache`: the tensors of the layout, and no others. `rows`: letter of the
    dimension of the new tokens. `layers`: letter of a leading dimension of the cache and the new tokens, if one launch covers
    several layers. Raises ValueError for an unsupported type, shape, stride, address or device of a tensor.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    new_type = str(present["key_new"].dtype).removeprefix("torch.")
    computed: tuple[str, ...] = (new_type,) if new_type in get_args(Compute) else get_args(Compute)
    new: TensorSpec = (computed, (*layers, rows, layout.kv_heads, layout.head_dim))
    specs: dict[str, TensorSpec] = {
        "key_new": new,
        "value_new": new,
        "query": (computed, (rows, "Hq", layout.head_dim)),
        "page_table": (INT32, ("B", "P")),
        "lengths": (INT32, ("B",)),
        "exact_slots": (INT32, ("B",)),
        "work": (INT32, ("Y", 5)),
        "sequences": (INT32, ("B", 4)),
    }
    cache_specs: dict[str, TensorSpec] = {
        name: ((kind,), (*layers, *dims)) for name, (kind, dims) in layout.tensor_dims().items()
    }
    if cache.keys() != cache_specs.keys():
        expected, actual = (", ".join(sorted(tensors)) or "nothing" for tensors in (cache_specs, cache))
        raise ValueError(f"the cache must have the tensors {expected}; got {actual}")
    if layout.exact_tokens and "exact_slots" not in present:
        raise ValueError(f"exact_slots must be given: the layout keeps {layout.exact_tokens} exact tokens")
    check({**present, **cache}, {name: spec for name, spec in specs.items() if name in present} | cache_specs)
    if "query" in present and present["query"].shape[1] % layout.kv_heads:
        raise ValueError(f"query must have a multiple of the {layout.kv_heads} KV heads, got {present['query'].shape[1]}")


def check_counts(tokens: int, sequences: int, splits: int | None) -> None:
    """Check the counts of a launch for new tokens of all sequences.

    Raises ValueError if there are no tokens, they cannot be divided among the sequences, or `splits` is less than 1.
    """
    if not sequences or not tokens:
        raise ValueError(f"lengths and query need at least one sequence and one new token, got {sequences} and {tokens}")
    if tokens % sequences:
        raise ValueError(f"query has {tokens} tokens, which cannot be divided evenly among {sequences} sequences")
    if splits is not None and splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")


def check(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Check types, dimensions and devices. All but queries, new keys and new values must be contiguous, and pools aligned."""
    sizes: dict[str, int] = {}
    device = next(iter(tensors.values())).device
    for name, (types, dims) in specs.items():
        tensor = tensors[name]
        problem = dimension_problem(name, tensor.shape, dims, sizes)
        if problem is not None:
            raise ValueError(problem)
        kind, address = str(tensor.dtype).removeprefix("torch."), tensor.data_ptr()
        fits = (
            kind in types and tensor.device == device and (name.endswith("_new") or name == "query" or tensor.is_contiguous())
        )
        if not fits or (name.endswith("_pool") and address % ALIGNMENT):
            raise ValueError(
                f"{name} must be {' or '.join(types)} on {device}, contiguous unless it holds new tokens, a pool at a multiple "
                f"of {ALIGNMENT} bytes; got {kind} on {tensor.device}, strides {tensor.stride()}, address {address:#x}"
            )
