"""The work list of a decode step, made on the GPU from the real lengths: which pages each program of decode_partial takes.

Shapes: B sequences, W programs of a KV head that run at once, Y = W programs, and one more of each sequence with exact tokens.

The pages of all sequences, one after the other, are cut into shares of equal length, one a program. A share may end within a
sequence and begin the next one. Every sequence counts a page at least, so that one without pages has a result too.

A part is what one program computes of one sequence. Program p's part of sequence b has the number p + b, or p + 2 b + 1 with
exact tokens, whose own part lies before the sequence's others: numbers grow along the pages, no two parts share one, and those
of a sequence follow each other.
"""

import triton
import triton.language as tl

PAGE = tl.constexpr(64)


@triton.jit
def _pages(lengths, b, batch, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Return the pages of sequences b that hold positions SINK to length - RECENT, 1 at least; 0 where b is no sequence."""
    end = tl.load(lengths + b, mask=b < batch, other=0) - RECENT
    pages = tl.where(end > SINK, tl.cdiv(end, PAGE) - SINK // PAGE, 1)
    return tl.where(b < batch, pages, 0)


@triton.jit(do_not_specialize=["batch", "programs"])
def plan_work(
    lengths, batch, programs, work, sequences,
    SINK: tl.constexpr, RECENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the work list. Grid (ceil(W / ROWS)).

    Args:
        lengths: (B) int32, tokens before the current one.
        batch: B.
        programs: W.
        work: Output (Y, 5) int32, a row of each program: its first sequence, the one after its last, its first page, the one
            after its last, and the number of its first part. Where there is no work, the second is below the first. With
            exact tokens, first come rows for those of each sequence, whose second is the first, with pages from 0 to 0.
        sequences: Output (B, 4) int32: the first page of each, the one after its last, the number of its first part, and how
            many parts it has.
        ROWS: Programs of decode_partial that one program of this kernel plans.
        BLOCK: Sequences that are read at once.
    """
    EXACT: tl.constexpr = 1 if SINK + RECENT > 0 else 0
    total = 0
    for first in tl.range(0, batch, BLOCK):
        total += tl.sum(_pages(lengths, first + tl.arange(0, BLOCK), batch, SINK, RECENT), 0)
    # A part is written and read again. With two pages at least that is below a fifth of the traffic of its pages, up to 8 query
    # heads of a KV head; with one it is a third.
    share = tl.maximum(tl.cdiv(total, programs), 2)

    program = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = program * share
    high = tl.minimum(low + share, total)
    begin = tl.zeros((ROWS,), tl.int32)
    last = tl.zeros((ROWS,), tl.int32)
    before = 0
    for first in tl.range(0, batch, BLOCK):
        b = first + tl.arange(0, BLOCK)
        exists = b < batch
        pages = _pages(lengths, b, batch, SINK, RECENT)
        ends = before + tl.cumsum(pages, 0)
        begin += tl.sum(((ends[None, :] <= low[:, None]) & exists[None, :]).to(tl.int32), 1)
        last += tl.sum(((ends[None, :] < high[:, None]) & exists[None, :]).to(tl.int32), 1)
        if tl.program_id(0) == 0:
            first_part = (ends - pages) // share + (1 + EXACT) * b
            tl.store(sequences + b * 4, ends - pages, mask=exists)
            tl.store(sequences + b * 4 + 1, ends, mask=exists)
            tl.store(sequences + b * 4 + 2, first_part, mask=exists)
            tl.store(sequences + b * 4 + 3, (ends - 1) // share - (ends - pages) // share + 1 + EXACT, mask=exists)
            if EXACT:
                tl.store(work + b * 5, b, mask=exists)
                tl.store(work + b * 5 + 1, b, mask=exists)
                tl.store(work + b * 5 + 2, 0, mask=exists)
                tl.store(work + b * 5 + 3, 0, mask=exists)
                tl.store(work + b * 5 + 4, first_part, mask=exists)
        before += tl.sum(pages, 0)
    row = work + (program + EXACT * batch) * 5
    exists = program < programs
    tl.store(row, begin, mask=exists)
    tl.store(row + 1, tl.where(low < total, last + 1, begin - 1), mask=exists)
    tl.store(row + 2, low, mask=exists)
    tl.store(row + 3, high, mask=exists)
    tl.store(row + 4, program + (1 + EXACT) * begin + EXACT, mask=exists)
