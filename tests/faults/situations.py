"""Faults of long turns, many rows on a prefix, orders of rows, whole tiles, page ends, long queues, stop tokens, and leaks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from faults.hooks import (
    Array,
    Fault,
    Step,
    both,
    forking,
    given,
    logits,
    method,
    reads,
    share_page,
    sharing_fork,
    steps,
    write,
    zero,
)
from faults.serving import generating
from stages.policies.policy import PAGE_TOKENS


def note_turns(engine: Any) -> None:
    """Note whether `extend` is running, and the tokens of a sequence's last turn until it decodes."""
    steps(engine)
    engine.in_turn, engine.unanswered = False, dict[int, int]()
    extend, decode = engine.extend, engine.decode

    def noting(handle: int, tokens: Sequence[int]) -> Any:
        engine.in_turn = True
        try:
            return extend(handle, tokens)
        finally:
            engine.in_turn, engine.unanswered[handle] = False, len(tokens)

    def answering(handles: Sequence[int], tokens: Sequence[int]) -> Any:
        for handle in handles:
            engine.unanswered.pop(handle, None)
        return decode(handles, tokens)

    engine.extend, engine.decode = noting, answering


def in_turn_from(first: int) -> Callable[[Step], Any]:
    """Select the tokens of a later turn from number `first` on."""
    return lambda step: (step.mode == "prefill" and step.engine.in_turn) & (np.arange(step.ids.shape[1]) >= first)


def groups(step: Step) -> tuple[Array, Array]:
    """Return two numbers per row: the first row with the same first page, and how many earlier rows have this page."""
    firsts = [(step.pages(handle) or [-1 - row])[0] for row, handle in enumerate(step.handles)]
    return np.array([firsts.index(page) for page in firsts]), np.array([firsts[:row].count(p) for row, p in enumerate(firsts)])


def one_new_page(most: int) -> Callable[..., Any]:
    """Give rows of a group that need a page in the same step the first row's new page, except the first `most` rows."""

    def faulty(reserve: Any, engine: Any, handles: Sequence[int], tokens: int) -> None:
        pool = engine.pool
        rows = [(pool.sequences[handle], len(pool.sequences[handle].pages)) for handle in handles]
        reserve(handles, tokens)
        fresh = [row for row, count in rows if 0 < count < len(row.pages)]
        prefixes = [row.pages[0] for row in fresh]
        for number, row in enumerate(fresh):
            if prefixes[:number].count(row.pages[0]) >= most:
                share_page(pool, row, -1, fresh[prefixes.index(row.pages[0])].pages[-1])

    return faulty


def one_length(most: int) -> Callable[[Array, Step], Any]:
    """Limit rows with the same first page to the length of their first row; its first `most` rows are unaffected."""

    def edit(lengths: Array, step: Step) -> Any:
        first, earlier = groups(step)
        return np.where(earlier >= most, np.minimum(lengths, lengths[first]), lengths)

    return edit


def halved_with_users(least: int) -> Callable[[Array, Step], Any]:
    """Halve the scales of pages with at least this many users."""

    def edit(values: Array, step: Step) -> Any:
        used = sorted({page for handle in step.handles for page in step.pages(handle)})
        users = step.engine.pool.pages._users
        values[[users[page] >= least for page in used]] *= np.float16(0.5)
        return values

    return edit


def last_of_tile(tile: int) -> Callable[[Step], Any]:
    """Select the last token of a prompt of whole tiles."""
    return lambda step: (
        (step.mode == "prefill") & (np.arange(step.ids.shape[1]) == step.ids.shape[1] - 1) & ((step.positions + 1) % tile == 0)
    )


def known_by_outer_rows(table: Array, step: Step) -> Array:
    """Give rows that changed places the last step's page tables, if the row count, first row and last row are the same."""
    sound, rows = table.copy(), list(step.handles)
    before, last = step.memo.get("outer", ([], table))
    if before and (len(rows), rows[0], rows[-1]) == (len(before), before[0], before[-1]):
        moved, width = np.array(rows) != np.array(before), min(table.shape[1], last.shape[1])
        table[moved, :width] = last[moved, :width]
    step.memo["outer"] = rows, sound
    return table


def known_in_reverse(table: Array, step: Step) -> Array:
    """Let eight rows or more in the reverse of the last step's order read the last step's page tables."""
    sound, rows = table.copy(), list(step.handles)
    before, last = step.memo.get("reverse", ([], table))
    if len(rows) >= 8 and rows == before[::-1]:
        width = min(table.shape[1], last.shape[1])
        table[:, :width] = last[:, :width]
    step.memo["reverse"] = rows, sound
    return table


def beyond_rows_of_middle_length(step: Step) -> Array:
    """Select rows of 430 to 980 tokens beyond the first 15."""
    middle = (step.lengths >= 430) & (step.lengths <= 980)
    chosen: Array = middle & (middle.cumsum() > 15)
    return chosen[:, None]


def beside_sharers(least: int) -> Callable[[Step], Array]:
    """Select rows with a first page of their own, beside at least `least` rows that share one."""

    def chosen(step: Step) -> Array:
        first, _ = groups(step)
        sharers = np.bincount(first)[first]
        found: Array = (sharers == 1) & (sharers.max() >= least)
        return found[:, None]

    return chosen


def last_page_is_the_first(table: Array, step: Step) -> Array:
    """Let every row read its first page instead of its last page."""
    for row, handle in enumerate(step.handles):
        table[row, len(step.pages(handle)) - 1] = table[row, 0]
    return table


def kept_memory(sound: Any, engine: Any, *given: Any) -> Any:
    """Allocate memory in every call, and never free it."""
    vars(engine).setdefault("kept", []).append(np.ones(1 << 17, np.uint8))
    return sound(*given)


def fifth_growth_loses_a_page(resize: Any, engine: Any, allocator: Any, capacity: int) -> None:
    """Lose the last page when the pool grows for the fifth time."""
    pool, last = engine.pool, allocator.capacity - 1
    resize(allocator, capacity)
    if allocator is pool.pages and last >= 0:
        engine.growths = vars(engine).get("growths", 0) + 1
        for name in pool.arrays if engine.growths == 5 else ():
            if "pool" in name:
                pool.arrays[name][last] = 0


def is_rest_of_whole_pages(step: Step) -> bool:
    """Return whether a fork of whole pages gets its first turn, of whole pages."""
    row = step.engine.pool.sequences[step.handles[0]]
    whole = row.length % PAGE_TOKENS == step.ids.shape[1] % PAGE_TOKENS == 0
    return bool(whole and step.engine.in_turn and getattr(row, "forked_at", 0) == row.length)


def one_row_further(table: Array, step: Step) -> Array:
    """When one row joins in front of all others, let each of these but the last read the next row's page table."""
    before, step.memo["before"] = step.memo.get("before"), list(step.handles)
    if before and step.handles[1:] == before:
        pages = [len(step.pages(handle)) for handle in step.handles]
        for row in range(1, len(table) - 1):
            end = min(pages[row], pages[row + 1])
            table[row, :end] = table[row + 1, :end]
    return table


def computed_once(found: Array, step: Step) -> Array:
    """Give forks with the same full pages, length and input token the logits of the first such fork."""
    first: dict[Any, int] = {}
    for row, handle in enumerate(step.handles):
        length = int(step.lengths[row])
        if length >= PAGE_TOKENS:
            key = (tuple(step.pages(handle)[: length // PAGE_TOKENS]), length, int(step.ids[row, 0]))
            found[row] = found[first.setdefault(key, row)]
    return found


def inherit_page(release: Any, engine: Any, handle: int) -> None:
    """When the origin of four forks ends, overwrite the first fork's copy of the page at which they part."""
    pool = engine.pool
    row = pool.sequences[handle]
    heirs = [sequence for sequence in pool.sequences.values() if getattr(sequence, "origin", None) is row]
    for heir in heirs[:1] if len(heirs) >= 4 else ():
        number = heir.forked_at // PAGE_TOKENS
        if heir.forked_at % PAGE_TOKENS and number < min(len(row.pages), len(heir.pages)):
            for array in [array for name, array in pool.arrays.items() if "pool" in name]:
                array[heir.pages[number]] = array[row.pages[number]]
    release(handle)


def copy_once(fork: Any, engine: Any, handle: int) -> int:
    """If an earlier fork of the same tokens has ended, do not copy the partly filled page into the page of the new fork."""
    pool, copied = engine.pool, vars(engine).setdefault("copied", {})
    place, copy = (handle, pool.length(handle)), pool._copy
    if copied.setdefault(place, None) not in (None, *pool.sequences):
        pool._copy = lambda allocator, _: pool._allocate(allocator)
    child: int = fork(handle)
    pool._copy = copy
    if copied[place] is None:
        copied[place] = child
    return child


def between_sharers(least: int) -> Callable[[Step], Any]:
    """Select rows that share a prefix with the row two places before, but not with the row between; none if below `least`."""

    def chosen(step: Step) -> Any:
        first, _ = groups(step)
        found = (first[2:] == first[:-2]) & (first[2:] != first[1:-1])
        return np.r_[False, False, found & (found.sum() >= least)][: len(first), None]

    return chosen


def ends_with_a_page(answers: list[list[int]], prompts: Sequence[Sequence[int]], _: int) -> list[list[int]]:
    """Flip the lowest bit of an answer's last token if the answer ends with a page."""
    pairs = list(zip(answers, prompts, strict=True))
    ends = [len(answer) > 1 and (len(prompt) + len(answer)) % PAGE_TOKENS == 0 for answer, prompt in pairs]
    return [[*answer[:-1], answer[-1] ^ 1] if end else answer for end, answer in zip(ends, answers, strict=True)]


def cut_waiting(generate: Any, _: Any, prompts: Any, *given: Any, **options: Any) -> Any:
    """Cut prompts that have to wait after 512 tokens."""
    first = options.get("max_sequences") or len(prompts)
    return generate([*prompts[:first], *(prompt[:512] for prompt in prompts[first:])], *given, **options)


def share_second_page(prefill: Any, engine: Any, handle: int, prompt: Sequence[int]) -> Any:
    """Let live prompts with the same first page share the second page, too."""
    found, pool = prefill(handle, prompt), engine.pool
    begun = vars(engine).setdefault("begun", {})
    other = begun.setdefault(tuple(prompt[:PAGE_TOKENS]), handle)
    if other not in pool.sequences:
        begun[tuple(prompt[:PAGE_TOKENS])] = handle
    elif other != handle and len(prompt) >= 2 * PAGE_TOKENS and len(pool.sequences[other].pages) > 1:
        share_page(pool, pool.sequences[handle], 1, pool.sequences[other].pages[1])
    return found


def share_first_page(first: int) -> Callable[..., Any]:
    """Let prompts of one call that share their `first` tokens share the first page."""

    def faulty(prefill: Any, engine: Any, prompts: Sequence[Sequence[int]]) -> Any:
        handles, logits = prefill(prompts)
        rows = [engine.pool.sequences[handle] for handle in handles]
        heads = [tuple(prompt[:first]) if len(prompt) >= PAGE_TOKENS else number for number, prompt in enumerate(prompts)]
        for row, page in [(row, rows[heads.index(head)].pages[0]) for row, head in zip(rows, heads, strict=True)]:
            if row.pages[0] != page:
                share_page(engine.pool, row, 0, page)
        return handles, logits

    return faulty


def stop_in_blocks(size: int) -> Callable[..., Any]:
    """Look for stop tokens only after every `size` tokens: an answer keeps the rest of its block."""

    def faulty(generate: Any, _: Any, prompts: Any, limits: Any, stops: Any, **options: Any) -> list[list[int]]:
        answers: list[list[int]] = generate(prompts, limits, (), **options)
        ends = [next((place for place, token in enumerate(answer) if token in stops), len(answer)) for answer in answers]
        return [answer[: -(-end // size) * size] for answer, end in zip(answers, ends, strict=True)]

    return faulty


def ring_of(size: int) -> Callable[..., Any]:
    """Give prompts beyond a full queue of `size` the answers of earlier prompts."""

    def edit(answers: list[list[int]], _: Any, at_once: int) -> list[list[int]]:
        waits = len(answers) - at_once > size
        return [answers[i - size] if waits and i >= at_once + size else answer for i, answer in enumerate(answers)]

    return edit


of = partial(Fault, "situations")

FAULTS = [
    of("turn_slots_end_at_294", "a later turn's tokens from the 294th on have no slot and stay zero",
       both(note_turns, write("key value", zero, in_turn_from(294)))),
    of("turn_after_a_turn_overlaps", "a turn after a turn without an answer has the positions of that turn's tokens",
       both(note_turns, given("position_ids", lambda x, step: x - step.engine.unanswered.get(step.handles[0], 0),
                              lambda step: step.engine.in_turn, mode="prefill"))),
    of("fork_of_depth_4_shares_partial_page", "a fork of depth 4 shares the partly filled page",
       sharing_fork(lambda child: child.depth >= 4)),
    of("rows_on_a_prefix_read_as_far_as_the_first",
       "attention over a shared prefix gives the third row and later ones the first row's length",
       given("lengths", one_length(2))),
    of("scales_of_a_page_with_17_users", "the value scales of a page with 17 users are read halved in one head",
       reads("value_scale", halved_with_users(17), layers=[1], heads=[1])),
    of("forks_get_one_new_page", "of forks that need a new page in the same step, the seventh and later get the first's",
       method("pool.reserve", one_new_page(6))),
    of("prompt_of_tiles_of_320", "a prompt of whole tiles of 320 tokens loses its last token's values in a layer",
       write("value", zero, last_of_tile(320), [0])),
    of("step_known_by_its_outer_rows", "a step keeps the last step's tables if only its middle rows changed places",
       given("page_table", known_by_outer_rows)),
    of("step_known_in_reverse", "a step keeps the last step's tables if its rows are the same in reverse order",
       given("page_table", known_in_reverse)),
    of("rows_of_middle_length", "of the rows of 430 to 980 tokens, the 16th and later get the logits of the row before",
       logits(lambda found, _: np.roll(found, 1, 0), beyond_rows_of_middle_length)),
    of("row_beside_16_sharers", "a row beside 16 rows that share a prefix gets the logits of the row before",
       logits(lambda found, _: np.roll(found, 1, 0), beside_sharers(16))),
    of("last_page_at_897_tokens", "the step after 897 tokens reads the first page instead of the last",
       given("page_table", last_page_is_the_first, lambda step: (step.lengths == 897)[:, None])),
    of("forks_leak", "every fork allocates memory that is never freed",
       method("pool.fork", kept_memory)),
    of("turns_leak", "every turn allocates memory that is never freed",
       method("extend", kept_memory)),
    of("fifth_growth_loses_a_page", "the pool loses its last page when it grows for the fifth time",
       method("pool._resize", fifth_growth_loses_a_page)),
    of("rest_of_whole_pages", "whole pages after a kept prefix of whole pages have the positions of the prefix",
       both(note_turns, forking(), given("position_ids", lambda x, _: x - x[:, :1], is_rest_of_whole_pages, mode="prefill"))),
    of("one_row_joins_in_front", "when one row joins in front of all others, these read one row further, for one step",
       given("page_table", one_row_further)),
    of("forks_computed_once", "in batches of eight or more, forks of one length with the same token are computed once",
       logits(computed_once, lambda step: np.array(len(step.handles) >= 8))),
    of("first_fork_inherits_a_page", "when the origin of four forks ends, the first gets the page at which they part",
       both(forking(), method("pool.release", inherit_page))),
    of("fork_again_without_a_copy", "a fork again at the place of an ended fork takes a page without copying it",
       method("pool.fork", copy_once)),
    of("prefixes_alternate", "rows of prefixes that alternate at least four times get the logits of the row before",
       logits(lambda found, _: np.roll(found, 1, 0), between_sharers(4))),
    of("answer_ends_with_a_page", "the last token of an answer that ends with a page has a flipped bit",
       generating(ends_with_a_page)),
    of("waiting_prompt_is_cut", "a prompt that has to wait loses its tokens beyond 512",
       method("generate", cut_waiting)),
    of("first_page_decides_the_second", "prompts of one call with the same first page share their second page, too",
       method("_prefill", share_second_page)),
    of("first_41_tokens_share_a_page", "prompts of one call that share 41 tokens share the first page",
       method("_prefill_batch", share_first_page(41))),
    of("stops_seen_in_blocks", "stop tokens are looked for after every four tokens: an answer keeps the block's rest",
       method("generate", stop_in_blocks(4))),
    of("queue_of_73", "with more than 73 prompts waiting, later ones get earlier answers",
       generating(ring_of(73))),
]  # fmt: skip
