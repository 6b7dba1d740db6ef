"""Faults of positions, lengths and exact tokens: the right token at the wrong position, or in the wrong slot."""

from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, add, given, method, write, zero
from faults.pages import offset
from stages.core.records import PREFILL_CHUNK
from stages.policies.policy import PAGE_TOKENS


def after_prefix(x: Array, _: Step) -> Any:
    """Rotate the tokens after a shared prefix as if the prefix ended at its last full page."""
    return x - x[:, :1] % PREFILL_CHUNK % PAGE_TOKENS


def in_bfloat16(x: Array, _: Step) -> Any:
    """Round to eight significant bits."""
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(x, 1))) - 7, 0))
    return np.round(x / unit) * unit


def ring(edit: Any) -> Plant:
    """Write exact tokens into other slots than decoding reads: `edit(slots, sinks, recent)`."""

    def faulty(places: Any, engine: Any, *given: Any) -> Any:
        pool = engine.pool
        found = places(*given)
        sizes = pool.policy.sink_tokens, pool.policy.recent_tokens
        if pool.buffers in found:
            found[pool.buffers] = [(tokens, buffers, edit(slots, *sizes)) for tokens, buffers, slots in found[pool.buffers]]
        return found

    return method("pool.places", faulty)


of = partial(Fault, "positions")
turn = partial(Fault, "turns")

FAULTS = [
    of("rope_one_late", "fp8", "decoded tokens are rotated one position late", given("position_ids", add(1))),
    of("rope_beyond_1024", "fp8", "a rotation table of 1,024 rows", given("position_ids", lambda x, _: np.minimum(x, 1023))
       + given("position_ids", lambda x, _: np.minimum(x, 1023), mode="prefill")),
    of("rope_in_bfloat16", "fp8", "decode's positions pass through bfloat16", given("position_ids", in_bfloat16)),
    of("after_192_decoded", "int8", "nothing is stored once a sequence has decoded 192 tokens",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 192)[:, None])),
    of("after_330_decoded", "int8", "nothing is stored from the 330th decoded token on",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 330)[:, None])),
    of("lengths_of_longest_row", "int8", "every row of a batch reads as many tokens as the longest one",
       given("lengths", lambda x, _: np.broadcast_to(x.max(), x.shape))),
    of("ring_never_wraps", "int8_sinks", "tokens that come round the ring stay in its last slot",
       ring(lambda slots, sink, recent: np.where(slots == sink, sink + recent - 1, slots)), "conformance"),
    turn("rope_after_prefix", "fp8", "what follows a shared prefix is rotated from its last full page on",
         given("position_ids", after_prefix, mode="prefill")),
    turn("second_turn_one_early", "int8", "the second turn of a conversation is rotated one position early",
         given("position_ids", add(-1), lambda s: (s.chunks > 1)[:, None], "prefill")),
    turn("turn_at_page_border_lost", "int8", "a turn that begins at a page's first slot loses its first token",
         write("key value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None] & offset(0)(s)
               & (s.positions == s.lengths[:, None]))),
    turn("turn_over_a_page_border", "int8", "a turn that crosses a page's end loses what lies beyond it",
         write("value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None]
               & (s.positions // 64 > s.lengths[:, None] // 64), layers=[2])),
]  # fmt: skip
