"""The largest tensors of the function body of attention over the cache: TensorRT's layers address 2^31 - 1 elements.

The body gathers and scores all positions of the pages that a plan is built for, whatever sequences are long. The attention
plugin makes no such tensor, and its kernels compute addresses in 64 bits.
"""

from collections.abc import Callable, Iterable

from pipeline.core.errors import UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from stages.engines.tensorrt.shapes import Limits

MOST_ELEMENTS = 2**31 - 1
"""Elements of a tensor: TensorRT's layers index in 32 bits (NVIDIA/TensorRT issues 1948, 3815, 4123)."""


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
    positions = PAGE_TOKENS * (limits.sequence_pages + limits.sequence_window_pages) + policy.exact_tokens
    scores = "the scores of {} against all positions of the pages"
    sizes = [
        (q_heads * limits.chunk * (positions + limits.chunk), scores.format(f"a chunk of {limits.chunk:,} tokens")),
        (limits.max_batch * q_heads * (positions + 1), scores.format("a decode step")),
    ]
    for side, form in policy.sides(layer).items():
        stored = shape.head_dim // max(1, 8 // form.code.bits)
        pages = limits.window_pages if side.in_window else limits.pages
        sizes.append((pages * shape.kv_heads * PAGE_TOKENS * stored, f"the {side} pool of layer {layer}"))
    return max(sizes, key=lambda size: size[0])


def _most_that_fits(elements: Callable[[int], int], largest_size: int) -> int:
    """Return the largest size whose elements TensorRT addresses, 0 where those of 1 are too many. More sizes have more."""
    low, high = 0, largest_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if elements(middle) <= MOST_ELEMENTS else (low, middle - 1)
    return low
