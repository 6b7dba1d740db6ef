"""Growth of the KL with the context, per workload."""

from collections.abc import Iterator

from pipeline import statistics
from pipeline.verdict.gates import distances
from pipeline.verdict.gates.distances import compared
from pipeline.verdict.registry import Evidence, Line, by_workload, gate
from pipeline.verdict.thresholds import Check, Positive

KEY = "max_kl_slope"


class Limits(distances.Limits):
    max_kl_slope: Positive = 0.05
    """Growth of the mean KL per 1,000 tokens of context. SmolLM2 at FP8: 0.02 at most."""


@gate(
    Limits,
    {KEY: Line("Growth of KL", "nats per 1,000 tokens of context", per="workload")},
    rank=25,
    looks=True,
    tests=lambda _, rows: len({row.workload for row in rows}),
)
def slope(evidence: Evidence, limits: Limits) -> Iterator[Check]:
    """Test the growth of each workload's KL with the context.

    FAIL: it clearly grows faster than `max_kl_slope`. PASS: it is shown not to. WARNING: neither, which keeps no candidate from
    passing, because the contexts of most workloads are too alike to show it. Workloads with fewer than `min_samples` documents
    have no line: a few nearly always lie on a line.
    """
    levels = evidence.look.fail_level(limits.alpha / evidence.together), limits.alpha
    most = statistics.bets.OUTLIER * limits.max_mean_kl
    for workload, rows in by_workload(evidence.rows).items():
        documents = [row.document for row in rows]
        x = [row.context_tokens / 1000 for row in rows]
        if len(set(documents)) < limits.min_samples or min(x) == max(x):
            continue
        y = [min(row.mean_kl or 0.0, most) for row in rows]
        result = statistics.bets.slope(x, y, documents, limits.max_kl_slope, levels)
        label = "growth of KL per 1k tokens"
        yield compared(KEY, workload, label, result, limits.max_kl_slope, unclear="WARNING")
