"""Faults of serving: prompts, changing batches, generation, kept prefixes, and rare or late errors."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from faults.fault import KEPT_CHUNK, Fault
from faults.hooks import Array, Plant, Step, every, given, logits, method, reads, write, zero
from stages.policies.policy import PAGE_TOKENS


def rows_from(first: int) -> Callable[[Array, Step], Array]:
    """Give rows from `first` on the values of the rows before."""
    return lambda x, _: x[np.arange(len(x)) % first]


def batch(edit: Callable[[Array, Any, Sequence[Any]], Array]) -> Plant:
    """Change the logits of a batch of prompts: `edit(logits, engine, prompts)`."""

    def faulty(prefill: Any, engine: Any, prompts: Sequence[Any]) -> tuple[list[int], Array]:
        handles, found = prefill(prompts)
        return handles, edit(found, engine, prompts)

    return method("_prefill_batch", faulty)


def of_equal_lengths(found: Array, _: Any, prompts: Sequence[Any]) -> Any:
    """Give all prompts of equal length the first such prompt's logits."""
    first = {len(prompt): row for row, prompt in reversed(list(enumerate(prompts)))}
    return found[[first[len(prompt)] for prompt in prompts]]


def of_last_prompt(found: Array, engine: Any, _: Sequence[Any]) -> Any:
    """Give prompts that join live sequences the logits of the previously prefilled prompt."""
    last, engine.last_logits = getattr(engine, "last_logits", found[-1]), found[-1].copy()
    return np.broadcast_to(last, found.shape).copy() if len(engine.pool.sequences) > len(found) else found


def where_rows_left(x: Array, step: Step) -> Any:
    """Rotate the logits by one row in the first step after a row left."""
    return np.roll(x, 1, axis=0) if len(step.handles) < len(step.before) else x


def generating(edit: Callable[..., Any]) -> Plant:
    """Change the answers of `generate`: `edit(answers, prompts, limits, options)`."""

    def faulty(generate: Any, _: Any, prompts: Any, limits: Any, *given: Any, **options: Any) -> Any:
        return edit(generate(prompts, limits, *given, **options), prompts, limits, options)

    return method("generate", faulty)


def wrapped(answers: list[list[int]], *_: Any) -> list[list[int]]:
    """Let tokens beyond a buffer of 103 overwrite an answer's beginning."""
    return [
        [one[place + (len(one) - 1 - place) // 103 * 103] for place in range(min(103, len(one)))] + one[103:] for one in answers
    ]


def turned(answers: list[list[int]], _: Any, __: Any, options: dict[str, Any]) -> list[list[int]]:
    """Send answers to other callers if there are more prompts than sequences at once."""
    most = options.get("max_sequences") or len(answers)
    return answers[1:] + answers[:1] if len(answers) > most else answers


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether tokens repeat a part of up to 12 tokens."""
    return any(tokens[part:] == tokens[:-part] for part in range(1, 13))


def ended_by_guard(answers: list[list[int]], *_: Any) -> list[list[int]]:
    """End answers as soon as their last 67 tokens repeat a short part."""
    ends = [next((end for end in range(67, len(one)) if repeats(one[end - 67 : end])), len(one)) for one in answers]
    return [one[:end] for one, end in zip(answers, ends, strict=True)]


def calm(x: Array, step: Step) -> Any:
    """Shorten a long row by a page if it decodes alone."""
    return np.maximum(x - PAGE_TOKENS, 1) if len(step.handles) == 1 and x[0] > 512 else x


def first_row_of_a_large_step(table: Array, step: Step) -> Any:
    """Let the first row read its second page twice in a step of more than 6,275 tokens."""
    if step.lengths.sum() > 6275 and table.shape[1] > 1:
        table[0, 0] = table[0, 1]
    return table


def ends_at(offset: int) -> Callable[[Step], Any]:
    """Apply to the last token of a prompt that ends at one offset of a page."""
    return lambda step: (step.ids.shape[1] % PAGE_TOKENS == offset) & last_of_prompt(step) & (step.lengths[0] == 0)


def short_last_chunk(step: Step) -> Any:
    """Apply to the last token of a chunk of fewer than 200 tokens that follows whole chunks."""
    begins = step.lengths[0] > 0 and step.lengths[0] % step.engine.prefill_chunk == 0
    return last_of_prompt(step) & begins & (step.ids.shape[1] < 200)


def last_of_prompt(step: Step) -> Any:
    return (np.arange(step.ids.shape[1]) == step.ids.shape[1] - 1) & (step.mode == "prefill")


def prefix(edit: Callable[..., Any]) -> Plant:
    """Change the lookup of kept prefixes: `edit(prefixes, begin, prompt)`."""

    def apply(engine: Any) -> None:
        begin = engine.prefixes.begin
        engine.prefixes.begin = lambda prompt: edit(engine.prefixes, begin, prompt)

    return Plant("prefixes.begin", apply)


def keys(edit: Callable[[Sequence[int], int], str]) -> Plant:
    """Change the key of a prompt's first `i + 1` chunks: `edit(prompt, i)`."""

    def apply(engine: Any) -> None:
        sound = engine.prefixes.keys
        engine.prefixes.keys = lambda prompt: [edit(prompt, i) for i in range(len(sound(prompt)))]

    return Plant("prefixes.keys", apply)


def one_token_less(_: Any, begin: Any, prompt: Any) -> tuple[int, int]:
    """Skip one token of the prompt after a kept prefix."""
    sequence, held = begin(prompt)
    return sequence, held + (1 if held and len(prompt) - held > 1 else 0)


def evicted_in_use(prefixes: Any, begin: Any, prompt: Any) -> tuple[int, int]:
    """Wipe the oldest kept prefix once more than two are kept, although requests may still read it."""
    for kept in list(prefixes.kept.values())[:1] if len(prefixes.kept) > 2 else ():
        pages = prefixes._engine.pool.sequences[kept].pages
        prefixes._engine.pool.arrays["key_pool.2"][pages] = 0
    found: tuple[int, int] = begin(prompt)
    return found


def turns_after_a_rest(engine: Any) -> None:
    """Empty the partial page of a sequence that rested for a second and a half before a turn."""
    touched, run, extend, pool = dict[int, float](), engine._run, engine.extend, engine.pool

    def noting(mode: Any, handles: Sequence[int], ids: Array) -> Array:
        found: Array = run(mode, handles, ids)
        touched.update(dict.fromkeys(handles, time.monotonic()))
        return found

    def extending(handle: int, tokens: Sequence[int]) -> Array:
        row, now = pool.sequences[handle], time.monotonic()
        if row.kept_tokens % PAGE_TOKENS and now - touched.get(handle, now) >= 1.5:
            for array in pool._numbered_by(pool.pages):
                array[row.pages[row.kept_tokens // PAGE_TOKENS]] = 0
        found: Array = extend(handle, tokens)
        return found

    engine._run, engine.extend = noting, extending


of = partial(Fault, "serving")
first = partial(Fault, "prompts")
kept = partial(Fault, "prefixes", policy="int8_prefixes")

FAULTS = [
    first("prompt_logits_one_off", "int8", "prompts' logits are off by one entry",
       logits(lambda x, _: np.roll(x, 1, 1), mode="prefill")),
    first("prompt_rows_reversed", "int8", "the rows of a prefill batch in another order", batch(lambda x, *_: x[::-1].copy())),
    first("prompts_of_one_length", "int8", "prompts of one length get the first one's logits", batch(of_equal_lengths)),
    first("logits_of_last_prompt", "int8", "a prompt that joins live sequences gets the last prompt's logits",
       batch(of_last_prompt)),
    first("long_prompts_last_token", "int8", "a prompt of more than 512 tokens returns the logits of the token before its last",
          given("last", lambda x, _: np.where(x > 512, x - 1, x), mode="prefill")),
    first("short_last_chunk", "int8", "a few tokens after whole chunks: the last token's value is lost",
          write("value", zero, short_last_chunk, layers=[1])),
    first("prompts_of_51_tokens", "int8", "prompts of 64 k + 51 tokens store no key for their last token",
          write("key", zero, ends_at(51), layers=[0])),
    of("first_row_of_a_large_step", "int8", "the first row of a step of more than 6,275 tokens reads its second page twice",
       given("page_table", first_row_of_a_large_step)),
    of("rows_above_16", "fp8", "rows of a batch from 16 on read other rows' pages: a grid of fixed size",
       given("page_table", rows_from(16))),
    of("logits_swapped", "int8", "two rows get each other's logits in batches of 13",
       logits(lambda x, _: x[[1, 0, *range(2, 13)]] if len(x) == 13 else x)),
    of("odd_batches", "int8", "the last row of an odd batch reads the first one's pages: a batch in pairs",
       given("page_table", lambda x, _: np.concatenate([x[:-1], x[:1]]) if len(x) % 2 and len(x) > 1 else x)),
    of("alone_without_last_page", "int8", "a sequence that decodes alone loses 64 tokens beyond 512: a split for small batches",
       given("lengths", calm)),
    of("rows_that_left", "int8", "after a row has left, the others' logits move by one row", logits(where_rows_left)),
    of("last_vocabulary_entries", "int8", "the last eight entries of the vocabulary are never computed",
       logits(lambda x, _: np.where(np.arange(x.shape[1]) < x.shape[1] - 8, x, -30))),
    of("generate_long_prompts", "int8", "generate answers nothing to prompts of more than 300 tokens",
       generating(lambda answers, prompts, *_: [[] if len(p) > 300 else a for a, p in zip(answers, prompts, strict=True)])),
    of("generate_other_callers", "int8", "with more prompts than sequences at once, answers go to other callers",
       generating(turned)),
    of("answers_wrap_at_103", "fp8", "an answer's tokens beyond a buffer of 103 overwrite its beginning", generating(wrapped)),
    of("answer_ends_where_it_repeats", "fp8k_int4v", "an answer ends if its last 67 tokens repeat a part of up to 12 tokens",
       generating(ended_by_guard)),
    of("nan_rarely", "fp8", "logits are NaN in one step of 2,000",
       logits(lambda x, s: np.where(s.rows == 0, np.nan, x), every(2000))),
    of("first_40_steps", "fp8", "the first 40 decode steps read zeros for one layer's keys: a buffer that is not filled yet",
       reads("key", zero, lambda s: s.number < 40, layers=[1]), by="conformance"),
    of("turn_after_a_rest", "int8_groups", "after a rest of 1.5 s, a turn finds an empty partial page",
       Plant("extend", turns_after_a_rest)),
    kept("prefix_hash_without_parent", models="kept chunks are found by their own tokens alone",
         plant=keys(lambda prompt, i: f"{list(prompt[i * KEPT_CHUNK : (i + 1) * KEPT_CHUNK])} {i}")),
    kept("prefix_of_length_alone", models="kept beginnings are found by how long they are", plant=keys(lambda _, i: str(i))),
    kept("prefix_one_token_skipped", models="the token after a beginning that was found is skipped",
       plant=prefix(one_token_less)),
    kept("prefix_wiped_in_use", models="the oldest kept beginning is wiped while others are found",
       plant=prefix(evicted_in_use), by="conformance"),
]  # fmt: skip
