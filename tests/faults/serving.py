"""Faults of serving: prompts, changing batches, generation, and rare or late errors."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from faults.hooks import Array, Fault, Plant, Step, every, given, logits, method, reads, write, zero


def rows_from(first: int) -> Callable[[Array, Step], Array]:
    """Give rows from `first` on the values of the rows before."""
    return lambda x, _: x[np.arange(len(x)) % first]


def batch(edit: Callable[[Array, Any, Sequence[Any]], Array]) -> Plant:
    """Change the logits of a batch of prompts: `edit(logits, engine, prompts)`."""

    def faulty(prefill: Any, engine: Any, prompts: Sequence[Any]) -> tuple[list[int], Array]:
        handles, found = prefill(prompts)
        return handles, edit(found, engine, prompts)

    return method("_prefill_batch", faulty)


def of_last_prompt(found: Array, engine: Any, _: Sequence[Any]) -> Any:
    """Give prompts that join live sequences the logits of the previously prefilled prompt."""
    last, engine.last_logits = getattr(engine, "last_logits", found[-1]), found[-1].copy()
    return np.broadcast_to(last, found.shape).copy() if len(engine.pool.sequences) > len(found) else found


def short_last_chunk(step: Step) -> Any:
    """Apply to the last token of a chunk of fewer than 200 tokens that follows whole chunks."""
    count = step.ids.shape[1]
    follows = step.mode == "prefill" and step.lengths[0] > 0 and step.lengths[0] % step.engine.prefill_chunk == 0
    return (np.arange(count) == count - 1) & (follows and count < 200)


def generating(edit: Callable[..., Any]) -> Plant:
    """Change the answers of `generate`: `edit(answers, prompts, prompts at once)`."""

    def faulty(generate: Any, _: Any, prompts: Any, *given: Any, **options: Any) -> Any:
        return edit(generate(prompts, *given, **options), prompts, options.get("max_sequences") or len(prompts))

    return method("generate", faulty)


def wrapped(answers: list[list[int]], *_: Any) -> list[list[int]]:
    """Let tokens beyond a buffer of 103 overwrite an answer's beginning."""
    return [
        [answer[place + (len(answer) - 1 - place) // 103 * 103] for place in range(min(103, len(answer)))] + answer[103:]
        for answer in answers
    ]


def turned(answers: list[list[int]], _: Any, at_once: int) -> list[list[int]]:
    """Send answers to other callers if there are more prompts than sequences at once."""
    return answers[1:] + answers[:1] if len(answers) > at_once else answers


def three_stop_tokens(generate: Any, _: Any, prompts: Any, limits: Any, stops: Sequence[int], **options: Any) -> Any:
    """Keep the three lowest stop tokens."""
    return generate(prompts, limits, sorted(stops)[:3], **options)


def rows_by_handle(decode: Any, _: Any, handles: Sequence[int], tokens: Sequence[int]) -> Any:
    """Return the rows of a step in the order of their handles."""
    return decode(*zip(*sorted(zip(handles, tokens, strict=True)), strict=True))


def wiped_while_idle(run: Any, engine: Any, *step: Any) -> Any:
    """Lose the first page of every live sequence after a tenth of a second without a step."""
    if time.monotonic() - vars(engine).get("last_step", time.monotonic()) > 0.1:
        for sequence in engine.pool.sequences.values():
            engine.pool.arrays["value_pool.1"][sequence.pages[:1]] = 0
    found = run(*step)
    engine.last_step = time.monotonic()
    return found


def wiped_in_a_full_pool(release: Any, engine: Any, handle: int) -> None:
    """In a full pool, wipe a page of a remaining request when another request ends or is preempted."""
    release(handle)
    if engine.pool.max_pages < 1 << 12 and engine.pool.sequences:
        engine.pool.arrays["value_pool.1"][list(engine.pool.sequences.values())[-1].pages[:1]] = 0


of = partial(Fault, "serving")
first = partial(Fault, "prompts")

FAULTS = [
    first("prompt_logits_one_off", "prompts' logits are off by one entry",
       logits(lambda x, _: np.roll(x, 1, 1), mode="prefill")),
    first("logits_of_last_prompt", "a prompt that joins live sequences gets the last prompt's logits",
       batch(of_last_prompt)),
    first("short_last_chunk", "a few tokens after whole chunks: the last token's value is lost",
          write("value", zero, short_last_chunk, layers=[1])),
    of("rows_above_16", "rows of a batch from 16 on read other rows' pages: a grid of fixed size",
       given("page_table", rows_from(16))),
    of("generate_other_callers", "with more prompts than sequences at once, answers go to other callers",
       generating(turned)),
    of("answers_wrap_at_103", "an answer's tokens beyond a buffer of 103 overwrite its beginning", generating(wrapped)),
    of("three_stop_tokens", "only the three lowest stop tokens end an answer", method("generate", three_stop_tokens)),
    of("rows_by_handle", "the rows of a step come in the order of their sequences", method("_decode", rows_by_handle)),
    of("idle_loses_a_page", "every sequence loses its first page while the engine idles", method("_run", wiped_while_idle)),
    of("full_pool_wipes_a_page", "a full pool wipes a page of another request than the one that ends",
       method("pool.release", wiped_in_a_full_pool)),
    of("a_step_is_off", "the logits of one step in 29 are off by a millionth, too little for any distance",
       logits(lambda x, _: x * np.float32(1 + 1e-6), every(29))),
    of("nan_rarely", "logits are NaN in one step of 2,000",
       logits(lambda x, s: np.where(s.rows == 0, np.nan, x), every(2000))),
    of("first_40_steps", "the first 40 decode steps read zeros for one layer's keys: a buffer that is not filled yet",
       reads("key", zero, lambda s: s.number < 40, layers=[1])),
]  # fmt: skip
