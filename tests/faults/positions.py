"""Positions, lengths, and the tokens that are kept exactly: the right token at the wrong place, or kept otherwise than said."""

from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, add, given, method, write, zero
from faults.pages import offset
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.records import PREFILL_CHUNK


def after_prefix(x: Array, _: Step) -> Any:
    """What follows a shared prefix is rotated as if the prefix ended with its last full page."""
    return x - x[:, :1] % PREFILL_CHUNK % PAGE_TOKENS


def in_bfloat16(x: Array, _: Step) -> Any:
    """Eight significant bits."""
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(x, 1))) - 7, 0))
    return np.round(x / unit) * unit


def without_decoded(x: Array, step: Step) -> Any:
    """A chunk after decoded tokens is rotated from where decoding began."""
    return x - step.decoded[:, None]


def one_slot_off(slots: Array, sink: int, recent: int) -> Any:
    """Slots of recent tokens one further than they are read."""
    return np.where(slots >= sink, sink + (slots - sink + 1) % recent, slots)


def ring(edit: Any) -> Plant:
    """Exact tokens go into other slots than they are read from: `edit(slots, sinks, recent)`."""

    def faulty(places: Any, engine: Any, *given: Any) -> Any:
        pool = engine.pool
        found = places(*given)
        sizes = pool.policy.sink_tokens, pool.policy.recent_tokens
        if pool.buffers in found:
            found[pool.buffers] = [(tokens, buffers, edit(slots, *sizes)) for tokens, buffers, slots in found[pool.buffers]]
        return found

    return method("pool.places", faulty)


def forks_late(fork: Any, engine: Any, handle: int) -> int:
    child: int = fork(handle)
    engine.memo.setdefault("forks", set()).add(child)
    return child


def is_fork(step: Step) -> Any:
    return np.array([handle in step.memo.get("forks", ()) for handle in step.handles])[:, None]


of = partial(Fault, "positions")
turn = partial(Fault, "turns")

FAULTS = [
    of("rope_one_late", "fp8", "decoded tokens are rotated one position late", given("position_ids", add(1))),
    of("rope_beyond_1024", "fp8", "a rotation table of 1,024 rows", given("position_ids", lambda x, _: np.minimum(x, 1023))
       + given("position_ids", lambda x, _: np.minimum(x, 1023), mode="prefill")),
    of("rope_in_bfloat16", "fp8", "decode's positions pass through bfloat16", given("position_ids", in_bfloat16)),
    of("rope_of_longest_row", "fp8", "rows of a ragged batch are rotated as the longest one: padding on the left",
       given("position_ids", lambda x, _: np.broadcast_to(x.max(), x.shape))),
    of("after_192_decoded", "int8", "nothing is stored once a sequence has decoded 192 tokens",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 192)[:, None])),
    of("after_330_decoded", "int8", "nothing is stored from the 330th decoded token on",
       write("key value", zero, lambda s: (s.mode == "decode") & (s.decoded >= 330)[:, None])),
    of("lengths_of_longest_row", "int8", "every row of a batch reads as many tokens as the longest one",
       given("lengths", lambda x, _: np.broadcast_to(x.max(), x.shape))),
    of("lengths_one_short", "int8", "the token before the new one is not read, in odd rows",
       given("lengths", lambda x, s: np.maximum(x - s.rows[:, 0] % 2, 1))),
    of("chunk_lengths_one_short", "int8", "a later chunk does not read the last token before it",
       given("lengths", lambda x, _: np.maximum(x - 1, 0), mode="prefill")),
    of("recent_one_slot_off", "int8_sinks", "the ring of recent tokens is written one slot off", ring(one_slot_off)),
    of("ring_over_the_sinks", "int8_sinks", "the ring of recent tokens begins at the sinks' slots",
       ring(lambda slots, sink, _: np.where(slots >= sink, slots - sink, slots))),
    of("ring_never_wraps", "int8_sinks", "tokens that come round the ring stay in its last slot",
       ring(lambda slots, sink, recent: np.where(slots == sink, sink + recent - 1, slots)), "conformance"),
    of("exact_slots_of_eight", "int8_sinks", "rows from 8 on read other rows' exact tokens",
       given("exact_slots", lambda x, _: x[np.arange(len(x)) % 8])),
    of("exact_tokens_of_prompts_alone", "int8_sinks", "decoded tokens are not kept exactly",
       write("key_exact value_exact", zero, lambda s: s.mode == "decode")),
    turn("rope_after_prefix", "fp8", "what follows a shared prefix is rotated from its last full page on",
         given("position_ids", after_prefix, mode="prefill")),
    turn("turn_without_decoded", "int8", "a turn is rotated as if nothing had been decoded before it",
         given("position_ids", without_decoded, mode="prefill")),
    turn("second_turn_one_early", "int8", "the second turn of a conversation is rotated one position early",
         given("position_ids", add(-1), lambda s: (s.chunks > 1)[:, None], "prefill")),
    turn("turn_at_page_border_lost", "int8", "a turn that begins at a page's first slot loses its first token",
         write("key value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None] & offset(0)(s)
               & (s.positions == s.lengths[:, None]))),
    turn("turn_over_a_page_border", "int8", "a turn that crosses a page's end loses what lies beyond it",
         write("value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None]
               & (s.positions // 64 > s.lengths[:, None] // 64), layers=[2])),
    turn("turn_reads_the_prompt_alone", "int8", "a turn does not read what was decoded before it",
         given("lengths", lambda x, s: np.maximum(x - s.decoded, 0), mode="prefill")),
    turn("decode_after_a_turn_one_late", "int8", "tokens decoded after a second turn are rotated one position late",
         given("position_ids", add(1), lambda s: (s.chunks > 1)[:, None])),
    turn("forks_one_late", "int8", "what a fork decodes is rotated one position late",
         method("pool.fork", forks_late) + given("position_ids", add(1), is_fork)),
    turn("short_turns_lost", "int8", "a turn of one token is not stored",
         write("key value", zero, lambda s: (s.mode == "prefill") & (s.chunks > 0)[:, None] & (s.ids.shape[1] == 1))),
    turn("turn_skips_a_token", "fp8", "the first token after a shared prefix is skipped",
         method("extend", lambda extend, _, handle, tokens: extend(handle, tokens[1:] if len(tokens) > 1 else tokens))),
    turn("turns_logits_of_first_token", "int8", "a turn returns the logits of its first token",
         given("last", lambda x, s: x * (s.chunks == 0), mode="prefill")),
]  # fmt: skip
