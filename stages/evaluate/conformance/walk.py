"""A random walk over all operations of an engine, on sequences of all lengths.

Many faults need a combination, for example a turn of a fork after an eviction. The walk draws operations, lengths and order
from the seed of the run. The lengths of short prompts take every residue modulo 64 before a residue repeats. The lengths of
turns take every residue modulo 16 in the same way.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

from stages.engines.interface import SupportsFork, SupportsRequests
from stages.evaluate.conformance.operations import StressTest
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.policy import PAGE_TOKENS

TILES = (144, 176, 208, 240, 320, 384, 448, 512)
"""Prompt lengths in tokens. Every multiple of 16 up to 256, and 320, 384, 448 and 512, divides at least one length."""

TURN_TILES = (120, 112)
"""Lengths of the first turns in tokens. Every even number up to 16, and 20 and 24, divides at least one length."""

JOINS, STEPS, TURNS, FORKS, RUNS, DEPARTURES, WAKES = 10, 22, 18, 11, 5, 10, 3
"""Number of operations of each kind."""
BORDERS = (-1, 0, 1, -2, 2)
"""Distances from a page's end, in tokens, at which `run` forks a row."""
EQUAL_TURN, FORK_STEPS = 20, 8
"""Maximum tokens of the first turn of forks, which is equally long for sibling forks, and maximum decode steps of a fork that
ends before the next fork of its row."""
LATE_TURN = 2 * PAGE_TOKENS + 1
"""Minimum tokens of a long turn late in the walk."""
PAGE_TURNS = 3 / 4
"""Maximum length of the row that `page_turns` extends, as a share of the maximum length."""
LAST_STEPS = 4
"""Decode steps for which every sequence keeps room until the end of the walk."""
PROMPTS_AT_ONCE, FORKS_AT_ONCE, LEAVING_AT_ONCE = 5, 4, 6
LATE = ((130, 600), (600, 900))
"""(minimum, maximum) tokens of each long prompt that joins a running batch. A drawn length is limited to two thirds of the
maximum length and rounded down to whole pages. The other long prompts begin together."""
FORKED_TOKENS = 960
"""Maximum tokens of the two rows whose forks fill the last batch, which also has a fork of the longest row. If possible, the
two rows have different prompts. So many rows of the batch have 430 to 980 tokens."""
CONTINUED = 6
"""Maximum number of different token sequences among many forks. Forks with equal tokens share a replay."""


def walk(test: StressTest) -> None:
    """Start, decode, rest, extend, fork and release sequences in random order; end with a full batch of the longest rows."""
    chunk, most = test.engine.prefill_chunk, test.max_tokens - PAGE_TOKENS // 2
    beyond = [tile + min(8, int(test.rng.geometric(1 / 2))) for tile in (256, chunk)]
    lengths = [length for length in (*TILES, chunk, *beyond, test.randint(430, 980)) if length <= most]
    chosen = test.rng.permutation(lengths)[: test.scaled(len(lengths))]
    long = [test.sequence("a long prompt", int(length)) for length in chosen]
    if isinstance(test.engine, SupportsRequests):
        for sequence in long[: test.largest]:
            sequence.ahead = test.draw(LAST_STEPS)
        if long:
            test.serve(long[: test.largest])
        return
    if isinstance(test.engine, SupportsFork):
        fill_pages(test)
    walker = Walk(test, long)
    operations = [*[walker.join] * JOINS, *[walker.step] * STEPS, *[walker.run] * RUNS, *[walker.leave] * DEPARTURES]
    operations += [test.wake] * WAKES
    if isinstance(test.engine, SupportsFork):
        operations += [*[walker.turn] * TURNS, *[walker.fork] * FORKS]
    order = [operations[place] for place in test.rng.permutation(len(operations))][: test.scaled(len(operations))]
    if isinstance(test.engine, SupportsFork):
        order.insert(test.randint(0, len(order) // 4), walker.long_turn)  # early, while it has room
        for _ in range(test.scaled(2) - 1):
            order.insert(test.randint(len(order) // 2, len(order)), walker.late_turn)
        order.append(walker.late_turn)
        for length in (test.randint(PAGE_TOKENS // 2, 3 * PAGE_TOKENS), PAGE_TOKENS)[: test.scaled(2)]:
            order.insert(test.randint(0, len(order)), partial(walker.keep, length))
    for operate in [*[walker.alone] * (test.scaled(2) - 1), *order, walker.alone]:
        operate()
    walker.finish()


def fill_pages(test: StressTest) -> None:
    """Fork a short prompt many times, and decode all forks. A fork takes one page, so the pool is full whenever it grows."""
    name, free = "one of many short forks", test.engine.max_sequences
    count = 2 * test.largest if free is None else min(2 * test.largest, free - len(test.resting))
    origin = test.sequence(name, 1)
    test.prefill(origin)
    rows = [origin]
    for number in range(1, count):
        rows.append(test.fork(origin, name, 1))
        if number > CONTINUED:
            rows[-1].ahead = list(rows[-1 - CONTINUED].ahead)
    for begin in range(0, count, test.largest):
        test.decode(*rows[begin : begin + test.largest])
    test.release(*rows)


class Walk:
    def __init__(self, test: StressTest, long: list[ForcedSequence]) -> None:
        """Start a conversation that lives to the end of the walk, and most of the long prompts, in one call."""
        self.test, self.rng = test, test.rng
        policy, most = test.engine.policy, test.max_tokens
        window = most if policy.window is None else policy.window.tokens
        self.longest_turn = max(test.engine.prefill_chunk, min(window, policy.latest_tokens(test.engine.shape) or most))
        """Maximum tokens of a turn, so that no token is evicted before its codes are recorded."""
        self.short = self._lengths(PAGE_TOKENS, min(3 * PAGE_TOKENS, most // 2))
        self.turns = itertools.chain(TURN_TILES, self._lengths(16, min(self.longest_turn, most // 4)))
        self.borders = iter(BORDERS * RUNS)
        self.order = itertools.count(test.randint(0, STEPS))
        """Numbers of the new orders of `step`, which take turns, so that every walk has every order."""
        begins = max(next(self.short), most - self.longest_turn - most // 4)
        self.talker = test.sequence("a conversation", begins)
        spans = LATE[: test.scaled(len(LATE))]
        late = [max(1, min(test.randint(*span), most * 2 // 3) // PAGE_TOKENS) * PAGE_TOKENS for span in spans]
        self.late = [*long[test.largest - 1 :], *(test.sequence("a long prompt", length) for length in late)]
        self.last: list[ForcedSequence] = []
        """Live rows of the last decode step, in its order."""
        self.rows: list[ForcedSequence] = []
        """Live rows; the conversation is the first."""
        self._start([self.talker, *long[: test.largest - 1]])

    def _lengths(self, modulus: int, most: int) -> Iterator[int]:
        """Yield lengths up to `most`, short ones more often, with all residues of `modulus` in random order."""
        while True:
            for residue in self.rng.permutation(modulus).tolist():
                size = int(math.exp(self.rng.uniform(0, math.log(most))))
                yield min(most, size - size % modulus + residue or modulus)

    def _start(self, sequences: Sequence[ForcedSequence]) -> None:
        self.test.prefill(*sequences)
        self.rows += sequences

    def _room(self, row: ForcedSequence) -> int:
        return self.test.max_tokens - LAST_STEPS - len(row.tokens)

    def _pick(self) -> ForcedSequence:
        """Return the conversation, one of the longest rows, or any row that has room for more tokens."""
        rows = [row for row in self.rows if self._room(row) > 0] or self.rows
        longest = sorted(rows, key=lambda row: -len(row.tokens))[:CONTINUED]
        return self.test.pick(self.test.pick((rows[:1], longest, *[rows] * 4)))  # the conversation is the first row

    def _decode(self, rows: Sequence[ForcedSequence], steps: int = 1) -> None:
        rows = [row for row in rows if self._room(row) >= steps]
        if rows:
            self.test.decode(*rows, steps=steps)
            self.last = rows

    def join(self) -> None:
        """Start prompts in one call. Some are long, and some begin like another prompt.

        They then decode in front of the rows of the last step, all at once or one by one.
        """
        joining = list[ForcedSequence]()
        count = self.test.randint(1, PROMPTS_AT_ONCE)
        self._make_room(count)
        for _ in range(min(self.test.largest - len(self.rows), count)):
            if self.late and self.rng.random() < 1 / 3:
                joining.append(self.late.pop())
                continue
            rest, begin = next(self.short), list[int]()
            if self.rng.random() < 1 / 3:
                begin = self.test.pick([*self.rows, *joining]).prompt
                begin = begin[: self.test.randint(1, 2 * PAGE_TOKENS)][: self.test.max_tokens // 2 - rest]
            joining.append(
                self.test.sequence(
                    "a prompt that begins like another" if begin else "a short prompt", [*begin, *self.test.draw(rest)]
                )
            )
        if joining:
            self._start(joining)
            at_once = 1 if self.rng.random() < 1 / 2 else len(joining)
            for number in range(0, len(joining), at_once):
                self._decode([*joining[number : number + at_once], *self.last])

    def step(self) -> None:
        """Decode all rows twice, in the order of the last step and in a new order; or a random subset of the rows once.

        Before half of the subsets, two batches of half the rows decode in turns.
        """
        same = [*self.last, *(row for row in self.rows if row not in self.last)]
        orders = self._orders(same)
        if self.rng.random() < 1 / 2:
            self._decode(same)
            self._decode(orders[next(self.order) % len(orders)])
            return
        rows = self.test.pick((same, *orders))
        if self.rng.random() < 1 / 2:  # two batches of equal size in turns, often with the longest rows first
            half = len(rows) // 2
            if self.rng.random() < 1 / 2:
                rows = sorted(rows, key=lambda row: -len(row.tokens))
                rows = [*rows[::2], *rows[1::2]]
            for batch in 2 * (rows[:half], rows[len(rows) - half :]):
                self._decode(batch)
        share = self.rng.random()
        self._decode([row for row in rows if self.rng.random() < share])

    def _orders(self, rows: list[ForcedSequence]) -> tuple[list[ForcedSequence], ...]:
        """Return the rows reversed, sorted by length, turned, or with some rows in another order or at another place."""
        begin, end = sorted(self.test.randint(0, len(rows)) for _ in range(2))
        before, middle, after = rows[:begin], rows[begin:end], rows[end:]
        by_length = sorted(rows, key=lambda row: len(row.tokens))
        return (
            rows[::-1],
            by_length,
            by_length[::-1],
            self._mixed(rows),
            [*before, *self._mixed(middle), *after],
            [*before, *middle[::-1], *after],
            [*before, *middle[:2][::-1], *middle[2:], *after],
            [*middle, *before, *after],
            [*after, *before, *middle],
        )

    def _mixed(self, rows: Sequence[ForcedSequence]) -> list[ForcedSequence]:
        return [rows[place] for place in self.rng.permutation(len(rows))]

    def alone(self) -> None:
        """Decode each row alone, by rising, then falling length, so that consecutive rows often have equally many pages."""
        rows, common = sorted(self.rows, key=lambda row: len(row.tokens)), self.test.draw(1)
        for row in [*rows, *rows[::-1]]:
            row.ahead = common * (self._room(row) > 0 and self.rng.random() < 1 / 2)
            self._decode([row])

    def run(self) -> None:
        """Decode a row to the end of a page while the other rows rest; fork it, and decode the forks."""
        row = self._pick()
        self._decode([row], (next(self.borders) - len(row.tokens)) % PAGE_TOKENS)
        self._make_room(FORKS_AT_ONCE, row)
        self._decode(list(dict.fromkeys(self._fork(row) for _ in range(FORKS_AT_ONCE))))

    def turn(self) -> None:
        """Extend a row once, or twice in succession. A fourth of the turns end with a page or just after one."""
        row = self.rows[0] if self.rng.random() < 1 / 6 else self._pick()
        for _ in range(2):
            length, ends = next(self.turns), self.rng.random() < 1 / 4
            if ends:
                length += -(len(row.tokens) + length) % PAGE_TOKENS + self.test.randint(0, 1) * self.test.randint(1, 3)
            self._extend(row, length)
            if not ends and self.rng.random() < 3 / 4:
                break

    def long_turn(self) -> None:
        """Extend the conversation by a turn that leaves room, and ends just after 256, 512 or 768 tokens if possible."""
        most = self._room(self.talker) - self.test.max_tokens // 4
        length = len(self.talker.tokens)
        tiles = [tile for tile in (256, 512, 768) if 0 < tile - length < most]
        if tiles:
            most = self.test.pick(tiles) - length + self.test.randint(1, 3)
        self._extend(self.talker, most)

    def late_turn(self) -> None:
        """Extend the longest row that has room for it by a turn of more than two pages, which may evict several pages."""
        rows = [row for row in self.rows if self._room(row) > LATE_TURN]
        if rows:
            row = max(rows, key=lambda row: len(row.tokens))
            self._extend(row, self.test.randint(LATE_TURN, self._room(row)))

    def page_turns(self) -> None:
        """Extend the longest row that leaves room for some pages in turns that end with a page, or a token before.

        After each turn, the row decodes past the page's end. If the turn ends with the page, a fork decodes with it.
        """
        most = self.test.max_tokens
        rows = [row for row in self.rows[1:] or self.rows if len(row.tokens) <= PAGE_TURNS * most]
        if not rows:
            return
        row = max(rows, key=lambda row: len(row.tokens))
        first = (len(row.tokens) + 2) // PAGE_TOKENS + 1
        drawn = self.test.randint(0, 1)
        for page in range(first, (most - LAST_STEPS) // PAGE_TOKENS + 1):
            before = (page + drawn) % 2
            self._extend(row, page * PAGE_TOKENS - before - len(row.tokens))
            self._make_room(1, row)
            branches = list(dict.fromkeys((row, row if before else self._fork(row))))
            self._decode(branches, before + 2)
            self._end(branches[1:])

    def keep(self, length: int) -> None:
        """Fork a kept prefix of `length` tokens once for each of four prompts that begin with it.

        The rest of one prompt is longer than the prefix, one rest has whole pages, and two short rests are equal. Each of the
        first two forks ends after some steps, so that the next fork of the prefix begins where an ended one began.
        """
        test = self.test
        self._make_room(4)
        if len(self.rows) > test.largest - 4 or 2 * length + 2 * PAGE_TOKENS > test.max_tokens:
            return
        kept = test.sequence("a kept prefix", length)
        self._start([kept])
        equal = test.text(test.randint(1, EQUAL_TURN // 2))
        for rest in (length + test.randint(1, PAGE_TOKENS), test.randint(1, 3) * PAGE_TOKENS, equal, equal):
            fork = self._fork(kept)
            self._extend(fork, rest)
            if rest is not equal:
                self._decode([fork], test.randint(1, FORK_STEPS))
                self._end([fork])
        self._decode(self.rows[-2:], 2)

    def _extend(self, row: ForcedSequence, chunk: int | Sequence[int]) -> None:
        count = min(chunk if isinstance(chunk, int) else len(chunk), self.longest_turn, self._room(row))
        if isinstance(self.test.engine, SupportsFork) and count > 0:
            self.test.extend(row, count if isinstance(chunk, int) else chunk[:count])

    def fork(self) -> None:
        """Fork a row several times, or make a chain of forks. Turns, ends and first decode steps vary at random."""
        row = min(self._pick(), self._pick(), key=lambda row: len(row.tokens))  # forks of short rows cost less
        chain, count = self.rng.random() < 1 / 3, self.test.randint(1, FORKS_AT_ONCE)
        self._make_room(count, row)
        branches = [row]
        if self.rng.random() < 2 / 3 and (gone := self._fork(row)) is not row:  # its pages serve the next forks
            if self.rng.random() < 1 / 2:
                self._extend(gone, self.test.randint(1, EQUAL_TURN))
            self._decode([gone] if self.rng.random() < 1 / 2 else [row, gone], self.test.randint(1, FORK_STEPS))
            self._end([gone])
            if self.rng.random() < 1 / 2:
                self._extend(row, self.test.randint(1, EQUAL_TURN))
        for _ in range(count):
            branches.append(self._fork(branches[-1] if chain else row))
        children = [branch for branch in dict.fromkeys(branches) if branch is not row]
        if children and row is not self.talker and self.rng.random() < 1 / 3:
            self._end([row])
        if self.rng.random() < 2 / 3:
            turn = self.test.text(self.test.randint(1, EQUAL_TURN))
            equal = self.rng.random() < 1 / 2
            for child in children:
                self._extend(child, turn if equal else len(turn))
        elif self.rng.random() < 1 / 2:
            self._decode(self._mixed([member for member in (row, *children) if member in self.rows]))

    def _fork(self, row: ForcedSequence) -> ForcedSequence:
        if not isinstance(self.test.engine, SupportsFork) or len(self.rows) >= self.test.largest:
            return row
        self.rows.append(self.test.fork(row, row.name if row.name.endswith("forked") else f"{row.name}, forked"))
        return self.rows[-1]

    def leave(self) -> None:
        self._release(self.test.randint(1, LEAVING_AT_ONCE))
        if self.rng.random() < 1 / 2:
            self.join()

    def _make_room(self, count: int, *staying: ForcedSequence) -> None:
        self._release(count - (self.test.largest - len(self.rows)), *staying)

    def _release(self, count: int, *staying: ForcedSequence) -> None:
        """Release up to `count` random rows: not the conversation or `staying`, and rarely one of the longest."""
        longest = sorted(self.rows, key=lambda row: -len(row.tokens))[: self.test.largest // 3]
        kept = {self.talker, *staying, *(row for row in longest if self.rng.random() < 15 / 16)}
        leaving = [row for row in self.rows if row not in kept]
        leaving = self._mixed(leaving)[: max(0, count)]
        self._end(leaving)

    def _end(self, leaving: Sequence[ForcedSequence]) -> None:
        self.rows = [row for row in self.rows if row not in leaving]
        self.last = [row for row in self.last if row not in leaving]
        self.test.release(*leaving)

    def finish(self) -> None:
        """Fill pages by turns, end the conversation at the maximum length, and decode the longest rows with forks of three."""
        test = self.test
        test.decode(*self.rows)
        forks = isinstance(test.engine, SupportsFork)
        if forks:
            self.page_turns()
        self._extend(self.talker, test.max_tokens)
        rows = sorted(self.rows, key=lambda row: -len(row.tokens))[: max(1, test.largest // 3) if forks else None]
        test.release(*(row for row in self.rows if row not in rows))
        for row in rows:
            row.ahead = test.draw(LAST_STEPS - 1)
        first, *others = [row for row in rows if len(row.tokens) <= FORKED_TOKENS] or rows
        others = [row for row in others if row.prompt is not first.prompt and len(row.tokens) > FORKED_TOKENS // 2] or others
        origins = [first, *others[:1]]
        for number in range(test.largest - len(rows) if forks else 0):
            row = origins[number % len(origins)] if number else rows[0]
            rows.append(test.fork(row, row.name, LAST_STEPS - 1))
            if number >= CONTINUED:
                rows[-1].ahead = list(rows[-1 - CONTINUED].ahead)
        mixed = self._mixed(rows)
        for order in (rows, mixed, mixed[::-1]):  # in the first one, forks of two rows alternate
            test.decode(*order)
        test.release(*rows)
