"""Pages: not written, another one read, shared where they should be copied, given away too early, another request's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Plant, Step, every, given, method, page, write, zero
from pipeline.core.kv import PAGE_TOKENS


def offset(number: int) -> Callable[[Step], Array]:
    """At one offset of every page."""
    return lambda step: step.positions % PAGE_TOKENS == number


def first_of_next_row(_: list[int], row: int, step: Step) -> int | None:
    """Another request's first page."""
    others = step.pages(step.handles[(row + 1) % len(step.handles)])
    return others[0] if len(step.handles) > 1 and others else None


def same_of_next_row(pages: list[int], row: int, step: Step) -> int | None:
    """Another request's third page, of requests that have three, in a crowd."""
    rows = [step.pages(handle) for handle in step.handles]
    others = [others for number, others in enumerate(rows) if len(others) > 2 and number != row]
    return others[0][2] if others and len(pages) > 2 and len(rows) > 7 else None


def free_one(pages: list[int], _: int, step: Step) -> int | None:
    """A page that an earlier request has left, for long requests in a crowd."""
    free = step.engine.pool.pages._free
    return min(free) if free and len(pages) > 2 and len(step.handles) > 7 else None


def of_one_request_in(count: int) -> Callable[[list[int], int, Step], int | None]:
    """One request in so many reads another request's first page."""
    return lambda pages, row, step: first_of_next_row(pages, row, step) if step.handles[row] % count == count - 1 else None


def beyond(tokens: int) -> Plant:
    """Pages beyond so many tokens are read from the sequence's first one."""

    def edit(table: Array, _: Step) -> Any:
        table[:, tokens // PAGE_TOKENS :] = table[:, :1]
        return table

    return given("page_table", edit)


def row_above_16(table: Array, step: Step) -> Any:
    """Rows of a large batch read another row's pages beyond 192 tokens."""
    for row in range(16, len(table)):
        pages = step.pages(step.handles[row - 16])
        for number in range(3, min(len(pages), len(step.pages(step.handles[row])))):
            table[row, number] = pages[number]
    return table


def table_of_the_step_before(table: Array, step: Step) -> Any:
    """A row that came in the place of another one finds that one's pages in its first step."""
    old = step.memo.get("table")
    if old is not None and len(old) >= len(table):
        for row, handle in enumerate(step.handles):
            if handle not in step.before and row < len(step.before):
                width = min(old.shape[1], len(step.pages(handle)))
                table[row, :width] = old[row, :width]
    step.memo["table"] = table.copy()
    return table


def newest_page_late(table: Array, step: Step) -> Any:
    """A page is in the table one step late: where it has its first token, the sequence's first page is read for it."""
    for row, length in enumerate(step.lengths):
        if length % PAGE_TOKENS == 1 and length > PAGE_TOKENS:
            table[row, length // PAGE_TOKENS] = table[row, 0]
    return table


def uncounted(engine: Any) -> None:
    """Forks share pages without being counted: the first that ends frees them for all."""
    allocator = engine.pool.pages
    free = allocator.free
    allocator.share = lambda page: page
    allocator.free = lambda page: free(page) if page in allocator._users else None


def fork_shares(which: Callable[[int], bool]) -> Plant:
    """A fork shares its origin's last page where `which` says so of the tokens in it: no copy on write."""

    def faulty(fork: Any, engine: Any, handle: int) -> int:
        child: int = fork(handle)
        pool = engine.pool
        source, copy = pool.sequences[handle], pool.sequences[child]
        inside = source.length % PAGE_TOKENS
        if inside and which(inside):
            pool.pages.free(copy.pages[-1])
            copy.pages[-1] = pool.pages.share(source.pages[source.length // PAGE_TOKENS - source.evicted_pages])
        return child

    return method("pool.fork", faulty)


def resized(resize: Any, engine: Any, allocator: Any, capacity: int) -> None:
    """When the pool grows, the content of its last page stays behind."""
    before = allocator.capacity
    resize(allocator, capacity)
    if before > 1 and allocator is engine.pool.pages:
        for array in engine.pool._numbered_by(allocator):
            array[before - 1] = 0


def freed_twice(release: Any, engine: Any, handle: int) -> None:
    """The first page of a sequence is free twice, so that two sequences get it."""
    first = engine.pool.sequences[handle].pages[:1]
    release(handle)
    allocator = engine.pool.pages
    if first and first[0] not in allocator._users and handle % 5 == 4:
        allocator._free.append(first[0])
        allocator._free.sort()


def free_of_two(free: Any, engine: Any, number: int) -> None:
    """The second owner's release finds the page gone."""
    if number in engine.pool.pages._users:
        free(number)


def last_page_kept(release: Any, engine: Any, handle: int) -> None:
    """The last page is not freed where it is not full."""
    row = engine.pool.sequences[handle]
    if row.pages and row.length % PAGE_TOKENS:
        engine.pool.pages.share(row.pages[-1])
    release(handle)


def scrubbed(release: Any, engine: Any, handle: int) -> None:
    """A sequence's pages are wiped when it ends, also those that a fork still has."""
    pages = list(engine.pool.sequences[handle].pages)
    release(handle)
    for array in engine.pool._numbered_by(engine.pool.pages):
        array[pages] = 0


def one_page_for_two(reserve: Any, engine: Any, handles: Sequence[int], tokens: int) -> None:
    """Two rows that need a page in the same step get the same one: a race of the allocator."""
    rows = {handle: engine.pool.sequences[handle] for handle in handles}
    before = {handle: len(row.pages) for handle, row in rows.items()}
    reserve(handles, tokens)
    grown = [row for handle, row in rows.items() if len(row.pages) > before[handle]]
    if len(grown) > 1 and tokens == 1:
        engine.pool.pages.free(grown[1].pages[-1])
        grown[1].pages[-1] = engine.pool.pages.share(grown[0].pages[-1])


def shared(same: Callable[[list[int]], Any], *, partial: bool = False) -> Plant:
    """Pages of a prompt are those of a live sequence whose tokens look the same: `same` is what is compared of each page.

    Full pages, or the last one where it is not full, into which both will write.
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


def padded(append: Any, engine: Any, handles: Sequence[int], new: dict[str, Array]) -> None:
    """The rows that fill up a batch write what they have into the first slot of page 0."""
    append(handles, new)
    if len(handles) % 8 and next(iter(new.values())).shape[2] == 1:
        engine.pool.arrays["value_pool.1"][0, :, 0] = 0


of = partial(Fault, "pages")
crowd = partial(Fault, "crowds")

FAULTS = [
    of("page_end_unwritten", "fp8", "the last token of every page is lost: an off-by-one of the append's mask",
       write("key value", zero, offset(63))),
    of("newest_missing_at_page_starts", "fp8", "the newest token is not attended to where it is the first of its page",
       given("lengths", lambda x, _: x - ((x % PAGE_TOKENS == 1) & (x > PAGE_TOKENS)))),
    of("newest_page_late", "fp8", "a new page is in the table one step late", given("page_table", newest_page_late)),
    of("stale_page_one_step_in_ten", "fp8", "another last full page in one step of ten: a race with the append",
       page(lambda pages, _, __: pages[0] if len(pages) > 2 else None, -2, every(10))),
    of("page_read_twice", "int8", "the second page is read in place of the third", page(lambda pages, *_: pages[1], 2)),
    of("page_number_in_a_byte", "int8", "page numbers above 255 wrap around", given("page_table", lambda x, _: x % 256)),
    of("context_beyond_1024", "fp8", "beyond 1,024 tokens the first page is read: a table of fixed width", beyond(1024)),
    of("pages_uncounted", "int8", "pages of a prefix are freed while others read them: a lost reference count",
       Plant("pool.pages", uncounted)),
    of("copy_on_write_missing", "int8", "a fork writes into its origin's page", fork_shares(lambda _: True)),
    of("copy_on_write_of_full_pages", "int8", "a page that is nearly empty is shared and not copied",
       fork_shares(lambda inside: inside < 8)),
    of("pool_grows_without_last_page", "int8", "a page is lost when the pool is reallocated", method("pool._resize", resized),
       "conformance"),
    of("last_page_leaks", "int8", "a page that is not full is never free again", method("pool.release", last_page_kept),
       harm="memory"),
    of("shared_pages_wiped", "int8", "pages are wiped when a sequence ends, also those that a fork still has",
       method("pool.release", scrubbed)),
    crowd("page_of_another_request_rarely", "fp8", "another request's page, in one request of 200",
          page(of_one_request_in(200), 0)),
    crowd("foreign_page_one_step_in_20", "int8", "another request's third page in one step of 20, in long requests in a crowd",
          page(same_of_next_row, 2, every(20))),
    crowd("freed_page_one_step_in_50", "int8", "what an earlier request left, in one step of 50, in long requests in a crowd",
          page(free_one, -2, every(50))),
    crowd("rows_above_16_beyond_192", "int8", "rows from 16 on read other rows' pages beyond 192 tokens",
          given("page_table", row_above_16)),
    crowd("first_step_of_another_request", "int8", "a request that takes another one's place reads its pages once",
          given("page_table", table_of_the_step_before)),
    crowd("page_freed_twice", "int8", "a page is freed twice and given to two requests",
          method("pool.release", freed_twice) + method("pool.pages.free", free_of_two)),
    crowd("one_page_for_two", "int8", "two requests that need a page in the same step get the same one",
          method("pool.reserve", one_page_for_two)),
    crowd("equal_prompts_never_part", "int8", "equal prompts share their last page, into which both write",
          shared(tuple, partial=True)),
    crowd("page_hash_without_parent", "int8", "equal pages of tokens are shared whatever was before them", shared(tuple)),
    crowd("page_hash_of_six_bits", "int8", "a hash of six bits: pages that collide are shared",
          shared(lambda tokens: sum(tokens) % 64)),
    crowd("values_of_another_row_faintly", "int8", "a hundredth of the next row's newest value is added to a row's",
          write("value", lambda x, _: x + np.round(np.roll(x, 1, axis=0) * 0.02), lambda s: s.mode == "decode", layers=[2])),
    crowd("padding_writes_page_0", "int8", "rows that pad a batch to a multiple of eight write into page 0",
          method("pool.append", padded)),
]  # fmt: skip
