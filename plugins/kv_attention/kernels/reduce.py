"""Second kernel of the attention: join the parts of each sequence that decode_partial computed.

Shapes: B sequences, Hq query heads, R parts of all sequences, D head_dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def decode_reduce(
    partial_acc, partial_ml, sequences, out,
    HQ: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts of one sequence and query head. Grid (Hq, B).

    Args:
        partial_acc: (R, Hq, D) float16 or float32, means of the values; 0 of a part without tokens.
        partial_ml: (R, Hq, 2) float32, m and l; a part without tokens has l = 0 and m = -inf.
        sequences: (B, 4) int32, as plan_work writes it.
        out: (B, Hq, D).
        CHUNK: Parts that are read at once.
        PDL: The kernel may begin before decode_partial has ended: it waits for the parts, not for a launch.
        ROUND: Round to bfloat16 by integer arithmetic, because Triton's interpreter truncates.
    """
    head = tl.program_id(0)
    b = tl.program_id(1)
    first = tl.load(sequences + b * 4 + 2)
    parts = tl.load(sequences + b * 4 + 3)
    if PDL:
        gdc_wait()
    d = tl.arange(0, D)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((D,), tl.float32)
    for done in tl.range(0, parts, CHUNK):
        part = done + tl.arange(0, CHUNK)
        row = (first + part).to(tl.int64) * HQ + head
        some = part < parts
        part_m = tl.load(partial_ml + row * 2, mask=some, other=float("-inf"))
        part_l = tl.load(partial_ml + row * 2 + 1, mask=some, other=0.0)
        means = tl.load(partial_acc + row[:, None] * D + d[None, :], mask=tl.broadcast_to(some[:, None], (CHUNK, D)), other=0.0)
        # It is finite: the first part has the current token.
        largest = tl.maximum(m, tl.max(part_m, 0))
        decay = tl.math.exp2(m - largest)
        weight = tl.math.exp2(part_m - largest)
        weight *= part_l
        l = l * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(means.to(tl.float32) * weight[:, None], 0)
        m = largest
    acc /= l
    if ROUND:
        bits = acc.to(tl.int32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    tl.store(out + (b.to(tl.int64) * HQ + head) * D + d, acc.to(out.dtype.element_ty))
