"""Faults of pages: unwritten, mixed up, shared instead of copied, freed too early, or another request's."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from faults.hooks import Array, Fault, Plant, Step, every, forking, given, method, reads, share_page, sharing_fork
from stages.policies.policy import PAGE_TOKENS


def stale(table: Array, step: Step) -> Any:
    """Read the first page instead of the last full one."""
    for row, handle in enumerate(step.handles):
        pages = step.pages(handle)
        if len(pages) > 2:
            table[row, len(pages) - 2] = pages[0]
    return table


def beyond(tokens: int) -> Plant:
    """Read the sequence's first page instead of all pages beyond `tokens` tokens."""

    def edit(table: Array, _: Step) -> Any:
        table[:, tokens // PAGE_TOKENS :] = table[:, :1]
        return table

    return given("page_table", edit)


def row_above_16(table: Array, step: Step) -> Any:
    """Let rows from 16 on read another row's pages beyond 192 tokens."""
    for row in range(16, len(table)):
        pages = step.pages(step.handles[row - 16])
        for number in range(3, min(len(pages), len(step.pages(step.handles[row])))):
            table[row, number] = pages[number]
    return table


def equal_prompts_share(prefill: Any, engine: Any, handle: int, prompt: Sequence[int]) -> Any:
    """Share the last page of a prompt that is not full with a live sequence of the same prompt; both write into it."""
    pool, known = engine.pool, engine.memo.setdefault("pages", {})
    begins = pool.length(handle) == 0
    logits = prefill(handle, prompt)
    row = pool.sequences[handle]
    if begins and len(prompt) % PAGE_TOKENS:
        owner, page = known.setdefault(tuple(prompt), (handle, row.pages[-1]))
        if owner != handle and owner in pool.sequences and page in pool.sequences[owner].pages:
            share_page(pool, row, -1, page)
        else:
            known[tuple(prompt)] = (handle, row.pages[-1])
    return logits


def loses_a_token(pool: Any, _: Any, child: Any) -> None:
    """Lose the last token of a partial page in a fork of a fork of a fork."""
    if child.depth > 2 and child.length % PAGE_TOKENS:
        pool.arrays["value_pool.1"][child.pages[-1], :, child.length % PAGE_TOKENS - 1] = 0


def third_of_eight(table: Array, step: Step) -> Any:
    """Let the third of eight rows of 430 to 980 tokens read a page of the fourth."""
    rows = [row for row, length in enumerate(step.lengths) if 430 <= length <= 980]
    if len(rows) >= 8:
        table[rows[2], 1] = table[rows[3], 1]
    return table


def leaked(values: Array, step: Step) -> Any:
    """Give a long sequence another sequence's number in a channel of one token."""
    used = sorted({page for handle in step.handles for page in step.pages(handle)})
    long = [handle for handle in step.handles if step.engine.pool.length(handle) > 2 * PAGE_TOKENS]
    others = [handle for handle in step.handles if handle not in long[:1]]
    if long and others:
        values[used.index(step.pages(long[0])[0]), 0, 5, 0] = values[used.index(step.pages(others[0])[0]), 0, 0, 0]
    return values


of = partial(Fault, "pages")
crowd = partial(Fault, "crowds")

FAULTS = [
    of("stale_page_one_step_in_ten", "another last full page in one step of ten: a race with the append",
       given("page_table", stale, every(10))),
    of("page_number_in_a_byte", "page numbers above 255 wrap around", given("page_table", lambda x, _: x % 256)),
    of("context_beyond_1024", "beyond 1,024 tokens the first page is read: a table of fixed width", beyond(1024)),
    of("third_fork_loses_a_token", "a fork of a fork of a fork does not get the last token of a partial page",
       forking(loses_a_token)),
    of("late_fork_shares_a_page", "a fork of more than 1,261 tokens shares the partial page instead of copying it",
       sharing_fork(lambda child: child.length > 1261)),
    crowd("third_of_eight_rows", "the third of eight rows of 430 to 980 tokens reads a page of the fourth",
          given("page_table", third_of_eight)),
    crowd("rows_above_16_beyond_192", "rows from 16 on read other rows' pages beyond 192 tokens",
          given("page_table", row_above_16)),
    crowd("number_of_another_request", "in one step of 20, a head reads another request's number in a channel of one token",
          reads("value", leaked, every(20), layers=[1], heads=slice(0, 1))),
    crowd("equal_prompts_never_part", "equal prompts share their last page, into which both write",
          method("_prefill", equal_prompts_share)),
]  # fmt: skip
