"""Cases of decode_attention.py, the bytes that they move, the targets, and the table of results. Does not import torch.

Shapes: B sequences of T tokens, H KV heads in groups of G query heads, D head_dim. A row is the result of one kernel in one
case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.table import Table

from plugins.kv_attention.layout import PAGE_TOKENS, CacheLayout, SideLayout

Row = dict[str, Any]

BATCHES = (1, 8, 32, 64)
TOKENS = (2048, 8192, 32768, 131072)
GROUPS = (4, 8)

FP8 = SideLayout("fp8_e4m3", "per_tensor")
STORAGES = {
    "fp8k_int4v": (FP8, SideLayout("int4", "per_group", 64)),
    "fp8": (FP8, FP8),
    "bf16": (SideLayout("bf16"), SideLayout("bf16")),
}
"""Formats of keys and values by storage. Every kernel reads one storage."""

JUDGED_KERNEL = "fp8k_int4v"
"""Name of the kernel that the targets judge, and of its storage."""

LARGE_BYTES = 400_000_000
"""Minimum bytes of keys and values for the targets to apply to sequences of one length. In smaller cases, launches and the join
of splits take a significant part of the time."""


@dataclass(frozen=True)
class DecodeCase:
    """One decode step of one layer, with one query token per sequence."""

    batch: int
    tokens: int
    """Tokens per sequence; in ragged batches, tokens of the longest sequence."""
    group: int
    kv_heads: int = 8
    head_dim: int = 128
    ragged: str = ""
    """Name of the batch in RAGGED; "" if all lengths are equal."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens by sequence."""
        return RAGGED[self.ragged] if self.ragged else (self.tokens,) * self.batch

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages by sequence."""
        return tuple(-(-length // PAGE_TOKENS) for length in self.lengths)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pages(self) -> int:
        """Pages of the longest sequence, the number of columns of the page table."""
        return max(self.page_counts)

    def layout(self, storage: str) -> CacheLayout:
        key, value = STORAGES[storage]
        return CacheLayout(self.kv_heads, self.head_dim, key, value)

    def kv_bytes(self, storage: str) -> int:
        """Return the bytes of keys, values and scales that the step has to read."""
        return sum(self.lengths) * self.layout(storage).token_bytes

    def moved_bytes(self, storage: str) -> int:
        """Return the minimum bytes that a kernel must move.

        These are the cache, the queries, the new token's keys and values, the outputs (all bfloat16), the page numbers and the
        lengths. Partial sums of splits do not count, because a kernel may not need them.
        """
        activations = 2 * self.batch * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return self.kv_bytes(storage) + activations + 4 * (sum(self.page_counts) + self.batch)

    def allocated_bytes(self, storage: str) -> int:
        """Return the bytes of the cache in whole pages."""
        return sum(self.page_counts) * PAGE_TOKENS * self.layout(storage).token_bytes

    def describe(self) -> Row:
        """Return the fields of a row that identify the case."""
        return {"batch": self.batch, "tokens": self.tokens, "group": self.group, "ragged": self.ragged}


RAGGED = {"one long": (131072, *(1024,) * 31), "mixed": tuple(512 << i % 8 for i in range(32))}
"""Lengths of ragged batches: 128k tokens and 31 times 1k; and four times each of 512, 1k, ... 64k."""


def grid(
    batches: Sequence[int] = BATCHES,
    tokens: Sequence[int] = TOKENS,
    groups: Sequence[int] = GROUPS,
    ragged: Sequence[str] = tuple(RAGGED),
) -> Iterator[DecodeCase]:
    """Yield every combination of batch, tokens and group, and the named ragged batches for every group."""
    for g in groups:
        yield from (DecodeCase(b, t, g) for b, t in product(batches, tokens))
        yield from (DecodeCase(len(RAGGED[name]), max(RAGGED[name]), g, ragged=name) for name in ragged)


def measured(case: DecodeCase, storage: str, microseconds: float, copy_bytes_per_s: float) -> Row:
    """Return the figures of a row."""
    rate = case.moved_bytes(storage) / (microseconds * 1e-6)
    return {
        "microseconds": microseconds,
        "kv_bytes": case.kv_bytes(storage),
        "moved_bytes": case.moved_bytes(storage),
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / copy_bytes_per_s,
    }


def add_ratios(rows: list[Row]) -> None:
    """Add speeds relative to the fastest correct fp8 peer and bf16 peer to every correct row of one case."""
    right = [row for row in rows if row.get("correct")]
    for storage in ("fp8", "bf16"):
        times = [row["microseconds"] for row in right if row["storage"] == storage and row["peer"]]
        for row in right if times else ():
            row[f"over_best_{storage}"] = min(times) / row["microseconds"]


TARGETS = {
    "share_of_copy": (0.85, "of the measured copy bandwidth"),
    "over_best_fp8": (1.25, "times the fastest FP8 peer"),
    "over_best_bf16": (2.3, "times the fastest bf16 peer"),
}
"""Targets of JUDGED_KERNEL in every large case, by field of a row: (minimum, its unit as text)."""


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return a verdict on every target over the measured large cases and the ragged ones.

    "missed": a case is below the minimum, is NaN, or has a wrong output. "not measured": no case has the figure, for example
    because there is no peer. Otherwise "met".
    """
    large = [
        row
        for row in rows
        if row["kernel"] == JUDGED_KERNEL and "microseconds" in row and (row["kv_bytes"] >= LARGE_BYTES or row.get("ragged"))
    ]
    verdicts = []
    for field, (minimum, what) in TARGETS.items():
        values = [row[field] if row["correct"] else 0.0 for row in large if field in row or not row["correct"]]
        met = sum(value >= minimum for value in values)
        verdicts.append(
            {
                "target": f"{JUDGED_KERNEL}: {minimum:g} {what}, from {LARGE_BYTES // 10**6} MB of cache on",
                "cases": len(values),
                "met": met,
                "worst": min(values, default=None),
                "verdict": "not measured" if not values else "met" if met == len(values) else "missed",
            }
        )
    return verdicts


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if an output was wrong, 3 if a target was missed, otherwise 0."""
    if not all(row.get("correct", True) for row in rows):
        return 1
    return 3 if any(verdict["verdict"] == "missed" for verdict in judge(rows)) else 0


def table(rows: Sequence[Row]) -> Table:
    """Return the results as a table."""
    out = Table(title="one decode step of one layer, H_kv 8, D 128; medians")
    for name in ("B", "T", "G", "kernel", "us", "KV MB", "GB/s", "of copy", "x fp8", "x bf16", "error", "chosen"):
        out.add_column(name, justify="left" if name in ("kernel", "chosen") else "right")
    for row in rows:
        case = (str(row["batch"]), row.get("ragged") or f"{row['tokens']:,}", str(row["group"]))
        if "microseconds" not in row:
            out.add_row(*case, row["kernel"], *[""] * 7, row["skipped"])
            continue
        figures = (f"{row['microseconds']:.1f}", f"{row['kv_bytes'] / 1e6:.0f}", f"{row['gb_per_s']:.0f}")
        ratios = (f"{row[field]:.2f}" if field in row else "" for field in TARGETS)
        error = f"{row['relative_error']:.1e}{'' if row['correct'] else ' WRONG'}"
        out.add_row(*case, row["kernel"], *figures, *ratios, error, row["chosen"])
    return out
