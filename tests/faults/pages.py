"""Pages: not written, another one read, shared where they should be copied, given away too early."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from faults.fault import Fault
from faults.hooks import Array, Writing, every, on_input, on_read, on_write
from pipeline.core.kv import PAGE_TOKENS

CODES = ("key_pool", "value_pool")


def unwritten(offset: int, arrays: Sequence[str] = CODES, sides: slice = slice(None)) -> Any:
    """What is written at one offset of every page is lost."""

    def edit(values: Array, writing: Writing) -> None:
        lost = (writing.positions % PAGE_TOKENS == offset)[:, None, :, None]
        values[:, sides] = np.where(lost, 0, values[:, sides])

    def plant(engine: Any) -> None:
        for array in arrays:
            on_write(engine, array, edit)

    return plant


def page_of(choose: Any) -> Any:
    """Another page in the table of a decode step. `choose(engine, table, row, handles)` changes one row of it."""

    def plant(engine: Any) -> None:
        def edit(table: Array, handles: Sequence[int]) -> None:
            before = table.copy()
            for row in range(len(table)):
                choose(engine, table, before, row, handles)

        on_input(engine, "decode", "page_table", edit)

    return plant


def _pages(engine: Any, handle: int) -> int:
    return -(-int(engine.pool.length(handle)) // PAGE_TOKENS)


def last_full_page_is_the_first(engine: Any, table: Array, _: Array, row: int, handles: Sequence[int]) -> None:
    count = _pages(engine, handles[row])
    if count > 2:
        table[row, count - 2] = table[row, 0]


def stale_now_and_then(engine: Any) -> None:
    due = every(10)

    def edit(table: Array, handles: Sequence[int]) -> None:
        if due():
            for row in range(len(table)):
                last_full_page_is_the_first(engine, table, table, row, handles)

    on_input(engine, "decode", "page_table", edit)


def of_one_request_in(count: int) -> Any:
    """Every so manieth sequence reads its first page from another sequence of the batch."""

    def choose(_: Any, table: Array, before: Array, row: int, handles: Sequence[int]) -> None:
        if handles[row] % count == count - 1 and len(table) > 1:
            table[row, 0] = before[(row + 1) % len(table), 0]

    return page_of(choose)


def number_in_a_byte(engine: Any) -> None:
    """The allocator's page numbers, kept in eight bits: page 256 is page 0."""
    tables = engine.pool.tables

    def faulty(handles: Sequence[int]) -> dict[str, Array]:
        given: dict[str, Array] = tables(handles)
        given["page_table"] = given["page_table"] % 256
        return given

    engine.pool.tables = faulty


def beyond(tokens: int) -> Any:
    """Pages beyond so many tokens are read from the sequence's first one."""

    def choose(_: Any, table: Array, before: Array, row: int, handles: Sequence[int]) -> None:  # noqa: ARG001
        table[row, tokens // PAGE_TOKENS :] = before[row, 0]

    return page_of(choose)


def uncounted(engine: Any) -> None:
    """Forks share pages without being counted: the first that ends frees them for all."""
    allocator = engine.pool.pages
    free = allocator.free
    allocator.share = lambda page: page

    def faulty(page: int) -> None:
        if page in allocator._users:
            free(page)

    allocator.free = faulty


def shared_last_page(engine: Any) -> None:
    """A fork writes into the page that its origin writes into, too: no copy on write."""
    pool, fork = engine.pool, engine.pool.fork

    def faulty(handle: int) -> int:
        child: int = fork(handle)
        source, copy = pool.sequences[handle], pool.sequences[child]
        if source.length % PAGE_TOKENS:
            pool.pages.free(copy.pages[-1])
            copy.pages[-1] = pool.pages.share(source.pages[source.length // PAGE_TOKENS])
        return child

    pool.fork = faulty


def grown_without_the_last(engine: Any) -> None:
    """When the pool grows, the content of its last page stays behind."""
    pool, resize = engine.pool, engine.pool._resize

    def faulty(allocator: Any, capacity: int) -> None:
        before = allocator.capacity
        resize(allocator, capacity)
        if before > 1 and allocator is pool.pages:
            for array in pool._numbered_by(allocator):
                array[before - 1] = 0

    pool._resize = faulty


def newest_missing_at_page_starts(engine: Any) -> None:
    def edit(lengths: Array, _: Sequence[int]) -> None:
        lengths -= (lengths % PAGE_TOKENS == 1) & (lengths > PAGE_TOKENS)

    on_input(engine, "decode", "lengths", edit)


def recycled(engine: Any) -> None:
    """Pages keep what their last owner wrote in one head, until the page is full: a late invalidation."""

    def edit(arrays: dict[str, Array], handles: Sequence[int]) -> dict[str, tuple[Any, Any]]:
        pages = [engine.pool.sequences[handle].pages for handle in handles]
        first = [listed[0] for listed in pages if len(listed) > 1]
        last = [listed[(engine.pool.length(handle) - 1) // PAGE_TOKENS] for handle, listed in zip(handles, pages, strict=True)
                if len(listed) > 1]  # fmt: skip
        return {"value_pool.1": ((last, 0), arrays["value_pool.1"][first, 0])} if last else {}

    on_read(engine, edit)


KIND = "pages"

FAULTS = [
    Fault("page_end_unwritten", KIND, "the last token of every page is lost: an off-by-one of the append's mask", "fp8",
          unwritten(PAGE_TOKENS - 1)),
    Fault("newest_missing_at_page_starts", KIND, "the newest token is not attended to where it is the first of its page", "fp8",
          newest_missing_at_page_starts),
    Fault("stale_page_one_step_in_ten", KIND, "another last full page in one step of ten: a race with the append", "fp8",
          stale_now_and_then),
    Fault("recycled_page", KIND, "one head of one layer reads the newest page's old content", "int8", recycled),
    Fault("page_of_another_request_rarely", KIND, "another request's page, in one request of 200", "fp8",
          of_one_request_in(200), rare=True),
    Fault("page_number_in_a_byte", KIND, "page numbers above 255 wrap around", "int8", number_in_a_byte, rare=True),
    Fault("context_beyond_1024", KIND, "beyond 1,024 tokens the first page is read: a table of fixed width", "fp8",
          beyond(1024)),
    Fault("pages_uncounted", KIND, "pages of a prefix are freed while others read them: a lost reference count", "int8",
          uncounted),
    Fault("copy_on_write_missing", KIND, "a fork writes into its origin's page", "int8", shared_last_page),
    Fault("pool_grows_without_last_page", KIND, "a page is lost when the pool is reallocated", "int8", grown_without_the_last),
]  # fmt: skip
