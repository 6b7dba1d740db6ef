"""Faults of pages: unwritten, mixed up, shared instead of copied, freed too early, or another request's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, every, given, method, page, write, zero
from stages.policies.policy import PAGE_TOKENS


def offset(number: int) -> Callable[[Step], Array]:
    """Apply at one offset of every page."""
    return lambda step: step.positions % PAGE_TOKENS == number


def first_of_next_row(_: list[int], row: int, step: Step) -> int | None:
    """Return another request's first page."""
    others = step.pages(step.handles[(row + 1) % len(step.handles)])
    return others[0] if len(step.handles) > 1 and others else None


def same_of_next_row(pages: list[int], row: int, step: Step) -> int | None:
    """Return another request's third page, if both requests have three pages and the batch has more than seven rows."""
    rows = [step.pages(handle) for handle in step.handles]
    others = [others for number, others in enumerate(rows) if len(others) > 2 and number != row]
    return others[0][2] if others and len(pages) > 2 and len(rows) > 7 else None


def of_one_request_in(count: int) -> Callable[[list[int], int, Step], int | None]:
    """Let every `count`-th request read another request's first page."""
    return lambda pages, row, step: first_of_next_row(pages, row, step) if step.handles[row] % count == count - 1 else None


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


def freed_twice(release: Any, engine: Any, handle: int) -> None:
    """Free a sequence's first page twice, so that two sequences receive it."""
    first = engine.pool.sequences[handle].pages[:1]
    release(handle)
    allocator = engine.pool.pages
    if first and first[0] not in allocator._users and handle % 5 == 4:
        allocator._free.append(first[0])
        allocator._free.sort()


def free_of_two(free: Any, engine: Any, number: int) -> None:
    """Let the second owner's release tolerate the missing page."""
    if number in engine.pool.pages._users:
        free(number)


def shared(same: Callable[[list[int]], Any], *, partial: bool = False) -> Plant:
    """Share pages of a prompt with a live sequence if `same` gives equal keys for the tokens of the two pages.

    Shares full pages or, if `partial`, only a last page that is not full, into which the two sequences will write.
    """

    def faulty(prefill: Any, engine: Any, handle: int, prompt: Sequence[int]) -> Any:
        pool, known = engine.pool, engine.memo.setdefault("pages", {})
        begins = pool.length(handle) == 0
        found: Array = prefill(handle, prompt)
        row = pool.sequences[handle]
        for number in range(len(row.pages) if begins else 0):
            tokens = list(prompt[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS])
            if (len(tokens) == PAGE_TOKENS) == partial or not tokens:
                continue
            key = (number, list(prompt) if partial else same(tokens))
            owner, owned = known.setdefault(str(key), (handle, row.pages[number]))
            if owner != handle and owner in pool.sequences and owned in pool.sequences[owner].pages:
                pool.pages.free(row.pages[number])
                row.pages[number] = pool.pages.share(owned)
            else:
                known[str(key)] = (handle, row.pages[number])
        return found

    return method("_prefill", faulty)


def third_fork_loses_a_token(fork: Any, engine: Any, handle: int) -> int:
    """Lose the last token of a partial page in a fork of a fork of a fork."""
    child: int = fork(handle)
    forks = engine.memo.setdefault("forks", {})
    forks[child] = forks.get(handle, 0) + 1
    row = engine.pool.sequences[child]
    if forks[child] > 2 and row.length % PAGE_TOKENS:
        engine.pool.arrays["value_pool.1"][row.pages[-1], :, row.length % PAGE_TOKENS - 1] = 0
    return child


def late_fork_shares(fork: Any, engine: Any, handle: int) -> int:
    """Share the partial page of a long sequence with its fork."""
    child: int = fork(handle)
    source, row = engine.pool.sequences[handle], engine.pool.sequences[child]
    if row.length > 1261 and row.length % PAGE_TOKENS:
        engine.pool.pages.free(row.pages[-1])
        row.pages[-1] = engine.pool.pages.share(source.pages[-1])
    return child


def lost_in_a_pause(table: Array, step: Step) -> Any:
    """Wipe a head's keys in the newest full page of sequences that no step touched for 60 steps."""
    last = step.memo.setdefault("last steps", {})
    for handle in step.handles:
        pages = step.engine.pool.sequences[handle].pages
        if step.number - last.get(handle, step.number) > 60 and len(pages) > 1:
            step.engine.pool.arrays["key_pool.1"][pages[-2], 0] = 0
        last[handle] = step.number
    return table


def third_of_eight(table: Array, step: Step) -> Any:
    """Let the third of eight rows of 430 to 980 tokens read a page of the fourth."""
    rows = [row for row, length in enumerate(step.lengths) if 430 <= length <= 980]
    if len(rows) >= 8:
        table[rows[2], 1] = table[rows[3], 1]
    return table


of = partial(Fault, "pages")
crowd = partial(Fault, "crowds")

FAULTS = [
    of("page_end_unwritten", "fp8", "the last token of every page is lost: an off-by-one of the append's mask",
       write("key value", zero, offset(63))),
    of("newest_missing_at_page_starts", "fp8", "the newest token is not attended to if it begins a page",
       given("lengths", lambda x, _: x - ((x % PAGE_TOKENS == 1) & (x > PAGE_TOKENS)))),
    of("stale_page_one_step_in_ten", "fp8", "another last full page in one step of ten: a race with the append",
       page(lambda pages, _, __: pages[0] if len(pages) > 2 else None, -2, every(10))),
    of("page_read_twice", "int8", "the second page is read instead of the third", page(lambda pages, *_: pages[1], 2)),
    of("page_number_in_a_byte", "int8", "page numbers above 255 wrap around", given("page_table", lambda x, _: x % 256)),
    of("context_beyond_1024", "fp8", "beyond 1,024 tokens the first page is read: a table of fixed width", beyond(1024)),
    of("third_fork_loses_a_token", "int8", "a fork of a fork of a fork does not get the last token of a partial page",
       method("pool.fork", third_fork_loses_a_token)),
    of("late_fork_shares_a_page", "int8", "a fork of more than 1,261 tokens shares the partial page instead of copying it",
       method("pool.fork", late_fork_shares)),
    of("page_lost_in_a_pause", "int8", "a sequence loses keys of its newest full page if no step touches it for 60 steps",
       given("page_table", lost_in_a_pause)),
    crowd("third_of_eight_rows", "int8", "the third of eight rows of 430 to 980 tokens reads a page of the fourth",
          given("page_table", third_of_eight)),
    crowd("page_of_another_request_rarely", "fp8", "another request's page, in one request of 200",
          page(of_one_request_in(200), 0)),
    crowd("foreign_page_one_step_in_20", "int8", "another request's third page in one step of 20, in long requests in a crowd",
          page(same_of_next_row, 2, every(20))),
    crowd("rows_above_16_beyond_192", "int8", "rows from 16 on read other rows' pages beyond 192 tokens",
          given("page_table", row_above_16)),
    crowd("page_freed_twice", "int8", "a page is freed twice and given to two requests",
          method("pool.release", freed_twice) + method("pool.pages.free", free_of_two)),
    crowd("equal_prompts_never_part", "int8", "equal prompts share their last page, into which both write",
          shared(tuple, partial=True)),
    crowd("values_of_another_row_faintly", "int8", "a hundredth of the next row's newest value is added to a row's",
          write("value", lambda x, _: x + np.round(np.roll(x, 1, axis=0) * 0.02), lambda s: s.mode == "decode", layers=[2])),
]  # fmt: skip
