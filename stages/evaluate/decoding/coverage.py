"""What a sample exercised of an engine, counted at every decode step, and the coverage of a round."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.verdict.coverage import Cell, Coverage, Exercised
from stages.evaluate.distances.metrics import context_bin
from stages.evaluate.inputs.tokens import EncodedSample


@dataclass
class Trace:
    """What one sample took an engine through."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of the sequence, that step's own included, and sequences of the step: of every row."""
    forks: int = 0
    """Sequences that were forked where they left the reference."""
    shared: int = 0
    """Tokens of a prefix that it continued from a fork."""
    chunk_borders: int = 0
    one_pass: int = 0
    """Scored tokens that were computed in one pass."""

    def prefilled(self, engine: Engine, tokens: int) -> None:
        """Note a prefill, or a later part of one."""
        self.chunk_borders += max(0, tokens - 1) // engine.prefill_chunk

    def joined(self, other: "Trace") -> "Trace":
        """Return what both passes of a sample took an engine through."""
        return Trace(
            [*self.steps, *other.steps],
            self.forks + other.forks,
            max(self.shared, other.shared),
            self.chunk_borders + other.chunk_borders,
            self.one_pass + other.one_pass,
        )


def _exercised(traced: Iterable[tuple[EncodedSample, Trace]], policy: KVPolicy, shape: KVShape, *, counted: bool) -> Exercised:
    members = list(traced)
    lengths = [length for _, trace in members for length, _ in trace.steps]
    # The prompt's last token is decoded too.
    decoded = [length - len(item.prompt) + 1 for item, trace in members for length, _ in trace.steps]
    offsets = {(length - 1) % PAGE_TOKENS for length in lengths}
    window = policy.window.tokens if policy.window is not None else None
    return Exercised(
        samples=len({item.sample.id for item, _ in members}) if counted else 0,
        rows=len(lengths),
        one_pass_rows=sum(trace.one_pass for _, trace in members),
        longest_context=max(lengths, default=0),
        longest_decode=max(decoded, default=0),
        batch_sizes=dict(sorted(Counter(batch for _, trace in members for _, batch in trace.steps).items())),
        missing_page_offsets=sorted(set(range(PAGE_TOKENS)) - offsets),
        page_borders=sum((length - 1) % PAGE_TOKENS == 0 for length in lengths),
        shared_prefixes=sum(trace.shared > 0 for _, trace in members),
        forks=sum(trace.forks for _, trace in members),
        chunk_borders=sum(trace.chunk_borders for _, trace in members),
        quantized_rows=sum(length - 1 > policy.exact_tokens for length in lengths),
        beyond_window_rows=0 if window is None else sum(length - 1 > window for length in lengths),
        evicted_rows=sum(policy.kept_tokens(length - 1, shape) < length - 1 for length in lengths),
    )


def coverage(
    traced: Sequence[tuple[EncodedSample, Trace]],
    policy: KVPolicy,
    shape: KVShape,
    edges: Sequence[int],
    *,
    counted: bool = True,
) -> Coverage:
    """Return what samples exercised, in all and by workload and context bin.

    Args:
        traced: Samples, and what each of their passes took the engine through.
        policy: The engine's.
        shape: The engine's.
        edges: Lower ends of the context bins in tokens.
        counted: Whether no other part of the evaluation's coverage counts these samples.
    """
    cells: dict[tuple[str, tuple[int, int | None]], list[tuple[EncodedSample, Trace]]] = {}
    for item, trace in traced:
        cells.setdefault((item.sample.workload, context_bin(len(item.prompt), edges)), []).append((item, trace))
    return Coverage(
        overall=_exercised(traced, policy, shape, counted=counted),
        cells=[
            Cell(
                workload=workload,
                context=context,
                exercised=_exercised(cells[workload, context], policy, shape, counted=counted),
            )
            for workload, context in sorted(cells, key=lambda key: (key[0], key[1][0]))
        ],
    )
