"""Second kernel of the attention: join the splits of decode_partial.

Shapes: B sequences, Hq query heads, S splits, BLOCK = S rounded up to a power of two, D head_dim.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(16)


@triton.jit(do_not_specialize=["splits"])
def decode_reduce(partial_acc, partial_ml, splits, out, D: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """Join the splits of one query head. Grid (B * Hq).

    Args:
        partial_acc: (B, Hq, S, D) float32, sums of weighted values; those of empty splits are not read.
        partial_ml: (B, Hq, S, 2) float32, m and l; an empty split has l = 0 and m = -inf.
        splits: S.
        out: (B, Hq, D).
        ROUND: Round to bfloat16 by integer arithmetic, because Triton's interpreter truncates.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    s = tl.arange(0, BLOCK)
    m = tl.load(partial_ml + (row * splits + s) * 2, mask=s < splits, other=float("-inf"))
    l = tl.load(partial_ml + (row * splits + s) * 2 + 1, mask=s < splits, other=0.0)
    largest = tl.max(m, 0)
    total = tl.sum(l * tl.math.exp2(m - largest), 0)
    acc = tl.zeros((D,), tl.float32)
    for first in range(0, splits, CHUNK):
        part = first + tl.arange(0, CHUNK)
        scale = tl.load(partial_ml + (row * splits + part) * 2, mask=part < splits, other=float("-inf"))
        weight = tl.math.exp2(scale - largest)
        sums = tl.load(
            partial_acc + (row * splits + part)[:, None] * D + d[None, :],
            mask=tl.broadcast_to((scale > float("-inf"))[:, None], (CHUNK, D)),
            other=0.0,
        )
        acc += tl.sum(sums * weight[:, None], 0)
    acc /= total
    if ROUND:
        bits = acc.to(tl.int32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty))
