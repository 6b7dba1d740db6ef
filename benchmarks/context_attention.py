"""Attention of several new tokens over a quantized history on a GPU, compared with torch's SDPA over bf16 keys and values.

    python -m benchmarks.context_attention --json benchmarks/results/context_attention_h200.json

Exit code 4 without a GPU or Triton, 1 if an output is wrong.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import attention_reference as reference
from benchmarks.attention_bench import DecodeInputs, GpuTimer, run_benchmark
from benchmarks.attention_cases import STORAGES, DecodeCase, Row

HISTORIES = ((8192, 512), (8192, 2048), (512, 512), (8192, 128), (8192, 4))
"""(cached tokens, new tokens) per sequence."""
CASES = tuple((DecodeCase(batch, history, 8), new) for history, new in HISTORIES for batch in (1, 4))
"""(sequences with their history, new tokens per sequence)."""
TOLERANCE = 5e-3


def measure(device: torch.device) -> Iterator[Row]:
    """Yield rows for every storage and for SDPA."""
    from plugins.kv_attention.launch import context_attention

    timer = GpuTimer(device)
    for case, new in CASES:
        batch, history = case.batch, case.tokens
        flops = 4 * batch * case.q_heads * case.head_dim * new * (history + (new + 1) / 2)
        what = {"batch": batch, "history": history, "new": new, "group": case.group}
        heads = (case.q_heads, case.kv_heads, case.kv_heads)
        query, key, value = (torch.randn(batch * new, h, case.head_dim, device=device).bfloat16() for h in heads)
        for storage in STORAGES:
            step = DecodeInputs(case, storage, device, seed=1)
            stored = [reference.dequantize(step.layout, step.cache, table.long(), history) for table in step.page_table]
            dense = [
                torch.cat([torch.stack(side), x.view(batch, new, case.kv_heads, -1).transpose(1, 2)], 2)
                for side, x in zip(zip(*stored, strict=True), (key, value), strict=True)
            ]
            rows = query.view(batch, new, case.q_heads, -1).transpose(1, 2)
            attend = partial(scaled_dot_product_attention, scale=step.scaling, enable_gqa=True)
            visible = torch.ones(new, history + new, dtype=torch.bool, device=device).tril(history)
            keys, values = dense
            exact = attend(rows[-1:].float(), keys[-1:].float(), values[-1:].float(), attn_mask=visible).transpose(1, 2)[0]
            inputs = (step.layout, query, key, value, step.cache, step.page_table, step.lengths)
            microseconds, out = timer(partial(context_attention, *inputs, scaling=step.scaling), None)
            # Compare the last sequence, to also detect errors in the start of the other sequences.
            error = float((out[-new:].float() - exact).norm() / exact.norm())
            tflops = flops / microseconds / 1e6
            yield what | {"kernel": storage, "microseconds": microseconds, "tflops": tflops, "error": error}
        dense_rows = partial(attend, rows, keys.bfloat16(), values.bfloat16(), attn_mask=causal_lower_right(new, history + new))
        microseconds, out = timer(dense_rows, None)
        error = float((out[-1].transpose(0, 1).float() - exact).norm() / exact.norm())
        yield what | {"kernel": "sdpa bf16", "microseconds": microseconds, "tflops": flops / microseconds / 1e6, "error": error}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments. Returns the exit code."""
    rows = run_benchmark("context_attention", __doc__, measure, argv)
    if rows is None:
        return 4
    return 1 if any(not row["error"] <= TOLERANCE for row in rows if row["kernel"] in STORAGES) else 0


if __name__ == "__main__":
    sys.exit(main())
