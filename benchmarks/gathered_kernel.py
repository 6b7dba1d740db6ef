"""The loop of published decode attention that sass_calibration.py compiles: tokens without pages, gathered one by one."""

import triton
import triton.language as tl


@triton.jit
def gathered(
    query, keys, values, places, partial, tokens, T: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr
):
    """Attend to the tokens of one (split, KV head): places (tokens), keys and values (slots, STRIDE), query (N, D)."""
    d, n = tl.arange(0, D), tl.arange(0, N)
    head, split = tl.program_id(0), tl.program_id(1)
    q = tl.load(query + (head * N + n)[:, None] * D + d[None, :])
    m = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    sums = tl.zeros((N, D), tl.float32)
    for first in range(split * tokens, split * tokens + tokens, T):
        t = first + tl.arange(0, T)
        inside = t < split * tokens + tokens
        place = tl.load(places + t, mask=inside, other=0).to(tl.int64) * STRIDE + head * D
        k = tl.load(keys + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, k), float("-inf"))
        v = tl.load(values + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(scores, 1))
        decay, p = tl.exp(m - m_new), tl.exp(scores - m_new[:, None])
        sums = tl.dot(p.to(v.dtype), v, sums * decay[:, None])
        total = total * decay + tl.sum(p, 1)
        m = m_new
    row = ((head * tl.num_programs(1) + split) * N + n)[:, None] * D
    tl.store(partial + row + d[None, :], sums / total[:, None])
