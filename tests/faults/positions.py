"""Faults of positions, lengths and exact tokens: the right token at the wrong position, or in the wrong slot."""

from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Plant, add, given, method, write, zero


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


of = partial(Fault, "positions")
turn = partial(Fault, "turns")

FAULTS = [
    of("rope_beyond_1024", "a rotation table of 1,024 rows", given("position_ids", lambda x, _: np.minimum(x, 1023))
       + given("position_ids", lambda x, _: np.minimum(x, 1023), mode="prefill")),
    of("after_192_decoded", "nothing is stored once a sequence has decoded 192 tokens",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 192)[:, None])),
    of("after_330_decoded", "nothing is stored from the 330th decoded token on",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 330)[:, None])),
    of("ring_never_wraps", "tokens that come round the ring stay in its last slot",
       ring(lambda slots, sink, recent: np.where(slots == sink, sink + recent - 1, slots))),
    turn("second_turn_one_early", "the second turn of a conversation is rotated one position early",
         given("position_ids", add(-1), lambda s: (s.chunks > 1)[:, None], "prefill")),
    turn("turn_over_a_page_border", "a turn that crosses a page's end loses what lies beyond it",
         write("value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None]
               & (s.positions // 64 > s.lengths[:, None] // 64), layers=[1])),
]  # fmt: skip
