"""The largest tensors of the function body of attention over the cache: TensorRT's layers address 2^31 - 1 elements.

The body gathers and scores all positions of the pages that a plan is built for, whatever sequences are long. The attention
plugin makes no such tensor, and its kernels compute addresses in 64 bits. How many prompts prefill together follows from that.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from stages.engines.tensorrt.shapes import Limits

MOST_ELEMENTS = 2**31 - 1
"""Elements of a tensor: TensorRT's layers index in 32 bits (NVIDIA/TensorRT issues 1948, 3815, 4123)."""

MOST_PREFILL_ROWS = 4
"""Prompts of a prefill run: with as many tokens of each as fit a chunk the GPU has enough to do, and activations are sized for
them whether they come or not."""

MOST_SHARED_ELEMENTS = 2**29
"""Elements of the scores of a function body in a run of several prompts, 1 GiB in float16; a run of one may have more."""


def prefill_rows(limits: Limits, q_heads: int, *, native: bool) -> int:
    """Return how many prompts a prefill run takes at most; `native` is whether any layer keeps its function body."""
    rows = min(MOST_PREFILL_ROWS, limits.max_batch)
    if not native:
        return rows
    return max(1, min(rows, MOST_SHARED_ELEMENTS // _scores_of_chunks(replace(limits, prefill_rows=1), q_heads)))


def check_extents(
    policy: KVPolicy, shape: KVShape, q_heads: int, layers: Iterable[int], *, max_batch: int, max_tokens: int
) -> None:
    """Raise UserError where the function body of one of `layers` would have a tensor that TensorRT cannot address.

    Args:
        policy: Any policy.
        shape: The model's shape.
        q_heads: The model's query heads.
        layers: The layers that keep their function body.
        max_batch: Most sequences of a decode step.
        max_tokens: Most tokens of a sequence.
    """
    native = list(layers)

    def most(batch: int, tokens: int) -> tuple[int, str]:
        sizes = (largest(Limits(policy, batch, tokens), shape, q_heads, layer) for layer in native)
        return max(sizes, key=lambda size: size[0], default=(0, ""))

    elements, what = most(max_batch, max_tokens)
    if elements <= MOST_ELEMENTS:
        return
    asked = f"backend.max_batch={max_batch}, backend.max_tokens={max_tokens}"
    fitting = _most_that_fits(lambda pages: most(max_batch, pages * PAGE_TOKENS)[0], max_tokens // PAGE_TOKENS) * PAGE_TOKENS
    batch = _most_that_fits(lambda sequences: most(sequences, max_tokens)[0], max_batch)
    fixes = [f"backend.max_tokens={fitting}"] * (fitting > 0) + [f"backend.max_batch={batch}"] * (batch > 0)
    raise UserError(
        f"{asked}: of kv={policy.name} {what} would have {elements:,} elements, and TensorRT's layers address "
        f"{MOST_ELEMENTS:,}; set at most {' or '.join(fixes) or 'a smaller backend.max_tokens and backend.max_batch'}"
    )


def largest(limits: Limits, shape: KVShape, q_heads: int, layer: int) -> tuple[int, str]:
    """Return the elements of the largest tensor of a layer's function body in either plan, and what it is."""
    policy = limits.policy
    scores = "the scores of {} against all positions of the pages"
    sizes = [
        (_scores_of_chunks(limits, q_heads), scores.format(f"a chunk of {limits.chunk:,} tokens")),
        (limits.max_batch * q_heads * (_positions(limits) + 1), scores.format("a decode step")),
    ]
    for side, form in policy.sides(layer).items():
        stored = shape.head_dim // max(1, 8 // form.code.bits)
        pages = limits.window_pages if side.in_window else limits.pages
        sizes.append((pages * shape.kv_heads * PAGE_TOKENS * stored, f"the {side} pool of layer {layer}"))
    return max(sizes, key=lambda size: size[0])


def _positions(limits: Limits) -> int:
    """Positions that a function body scores for each query."""
    return PAGE_TOKENS * (limits.sequence_pages + limits.sequence_window_pages) + limits.policy.exact_tokens


def _scores_of_chunks(limits: Limits, q_heads: int) -> int:
    """Elements of the scores of a prefill run."""
    return limits.prefill_rows * q_heads * limits.chunk * (_positions(limits) + limits.chunk)


def _most_that_fits(elements: Callable[[int], int], largest_size: int) -> int:
    """Return the largest size whose elements TensorRT addresses, 0 where those of 1 are too many. More sizes have more."""
    low, high = 0, largest_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if elements(middle) <= MOST_ELEMENTS else (low, middle - 1)
    return low
