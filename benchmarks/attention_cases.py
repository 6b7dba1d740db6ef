"""What decode_attention.py measures: the cases, the bytes they move, the targets, the table. No torch.

Shapes: B sequences of T tokens, H KV heads in groups of G query heads, D head_dim. A row is what one kernel did in one case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
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
"""How keys and values lie in memory; every kernel reads one of these."""

OURS = "fp8k_int4v"
"""The kernel that is judged, and its storage."""

LARGE_BYTES = 400_000_000
"""Of keys and values: from here on targets hold. Below, launches and the join of splits count."""


@dataclass(frozen=True)
class Case:
    """One decode step of one layer: one query token of each sequence."""

    batch: int
    tokens: int
    group: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return -(-self.tokens // PAGE_TOKENS)

    def layout(self, storage: str) -> CacheLayout:
        key, value = STORAGES[storage]
        return CacheLayout(self.kv_heads, self.head_dim, key, value)

    def kv_bytes(self, storage: str) -> int:
        """Keys, values and scales that the step has to read."""
        return self.batch * self.tokens * self.layout(storage).token_bytes

    def moved_bytes(self, storage: str) -> int:
        """The least that a kernel can move: those, queries, the new token's keys and values, outputs (all bfloat16), and the
        table of pages. Partial sums of splits are the kernel's own affair."""
        around = 2 * self.batch * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return self.kv_bytes(storage) + around + 4 * self.batch * (self.pages + 1)

    def allocated_bytes(self, storage: str) -> int:
        """Whole pages."""
        return self.batch * self.pages * PAGE_TOKENS * self.layout(storage).token_bytes

    def describe(self) -> Row:
        return {"batch": self.batch, "tokens": self.tokens, "group": self.group}


def grid(batches: Sequence[int] = BATCHES, tokens: Sequence[int] = TOKENS, groups: Sequence[int] = GROUPS) -> Iterator[Case]:
    return (Case(b, t, g) for g, b, t in product(groups, batches, tokens))


def measured(case: Case, storage: str, microseconds: float, copy_bytes_per_s: float) -> Row:
    """What follows from the time of one kernel in one case."""
    rate = case.moved_bytes(storage) / (microseconds * 1e-6)
    return {
        "microseconds": microseconds,
        "kv_bytes": case.kv_bytes(storage),
        "moved_bytes": case.moved_bytes(storage),
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / copy_bytes_per_s,
    }


def add_ratios(rows: list[Row]) -> None:
    """Give every row of one case that was measured its speed relative to the fastest right kernel over fp8, and over bf16:
    its own storage's included, so that the fastest one has 1."""
    for storage in ("fp8", "bf16"):
        times = [row["microseconds"] for row in rows if row.get("correct") and row["storage"] == storage]
        for row in rows:
            if row.get("correct"):
                row[f"over_best_{storage}"] = min(times) / row["microseconds"] if times else None


@dataclass(frozen=True)
class Target:
    """What issue 4 asks of fp8k_int4v in every large case."""

    field: str
    least: float
    text: str


TARGETS = (
    Target("share_of_copy", 0.85, "share of the measured copy bandwidth"),
    Target("over_best_fp8", 1.25, "times the fastest FP8 kernel"),
    Target("over_best_bf16", 2.3, "times the fastest bf16 kernel"),
)


def judge(rows: Sequence[Row]) -> list[Row]:
    """Every target against the large cases that were measured; a wrong result misses it, no case at all leaves it open."""
    large = [row for row in rows if row["kernel"] == OURS and "microseconds" in row and row["kv_bytes"] >= LARGE_BYTES]
    verdicts = []
    for target in TARGETS:
        cases = [row for row in large if not row["correct"] or row.get(target.field) is not None]
        values = [row[target.field] for row in cases if row["correct"]]
        met = sum(value >= target.least for value in values)
        verdicts.append(
            {
                "target": f"{OURS}: {target.least:g} {target.text}, from {LARGE_BYTES // 10**6} MB of cache on",
                "cases": len(cases),
                "met": met,
                "worst": min(values, default=None),
                "median": median(values) if values else None,
                "verdict": "not measured" if not cases else "met" if met == len(cases) else "missed",
            }
        )
    return verdicts


def table(rows: Sequence[Row]) -> Table:
    out = Table(title="one decode step of one layer, H_kv 8, D 128; medians")
    for name in ("B", "T", "G", "kernel", "us", "KV MB", "GB/s", "of copy", "x fp8", "x bf16", "error", "chosen"):
        out.add_column(name, justify="left" if name in ("kernel", "chosen") else "right")
    for row in rows:
        case = (
            str(row["batch"]),
            f"{row['tokens'] // 1024}k" if row["tokens"] >= 1024 else str(row["tokens"]),
            str(row["group"]),
        )
        if "microseconds" not in row:
            out.add_row(*case, row["kernel"], *[""] * 7, row["skipped"])
            continue
        chosen = ", ".join(f"{key} {value}" for key, value in row["chosen"].items())
        error = f"{row['relative_error']:.1e}{'' if row['correct'] else ' WRONG'}"
        figures = (f"{row['microseconds']:.1f}", f"{row['kv_bytes'] / 1e6:.0f}", f"{row['gb_per_s']:.0f}")
        ratios = (_ratio(row.get("share_of_copy")), _ratio(row.get("over_best_fp8")), _ratio(row.get("over_best_bf16")))
        out.add_row(*case, row["kernel"], *figures, *ratios, error, chosen)
    return out


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
