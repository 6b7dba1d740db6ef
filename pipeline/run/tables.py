"""The tables and sentences at the end of a run."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from pipeline.registry import promotion
from pipeline.registry.promotion import PASS, Move
from pipeline.registry.summary import Candidate
from pipeline.run import console
from pipeline.run.identity import Identity
from pipeline.run.verify import Finding

COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("PPL\nratio", "quality/ppl_ratio", "1", ".4f"),
    ("mean\nKL", "quality/kl_mean", "0", ".1e"),
    ("top-10\noverlap", "quality/top10_overlap", "1", ".3f"),
    ("retrieval\naccuracy", "quality/retrieval/accuracy_candidate", "quality/retrieval/accuracy_baseline", ".3f"),
    ("decode\ntokens/s", "perf/decode_tokens_per_s", "baseline/decode_tokens_per_s", ".0f"),
)
"""Heading, the candidate's metric, the baseline's (or what it is by definition), format."""

REASONS_SHOWN = 4

FINDING_COLOURS = {"same": "green", "missing": "yellow", "differs": "red"}
COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def print_comparison(candidates: Sequence[Candidate]) -> None:
    """One row an engine: what it costs, what it loses, how fast it is."""
    title = "KV caches against the FP16-KV engine, on the decode path"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("KiB/token", *(heading for heading, _, _, _ in COLUMNS)):
        table.add_column(heading, justify="right", no_wrap=True)
    baselines = {candidate.baseline_digest: candidate for candidate in reversed(candidates)}
    for judged in reversed(baselines.values()):
        metrics, name = judged.metrics, "fp16" if len(baselines) == 1 else f"fp16 of {judged.name}"
        cells = [_cell(metrics.get(column), form) if "/" in column else column for _, _, column, form in COLUMNS]
        table.add_row(name, "baseline", _cell(metrics.get("baseline/kib_per_token"), ".3f"), *cells, style="dim")
    for engine in candidates:
        colour = COLOURS[engine.verdict]
        cells = [_cell(engine.metrics.get(metric), form) for _, metric, _, form in COLUMNS]
        table.add_row(engine.name, f"[{colour}]{engine.verdict}[/]", _cell(engine.kib_per_token, ".3f"), *cells)
    console.out.print()
    console.out.print(table)


def print_findings(evidence: Path, identity: Identity, findings: Sequence[Finding]) -> None:
    """What a replay found, a line each, what is wrong last."""
    console.out.print(f"[bold]{escape(identity.policy)}[/] of {escape(identity.model)}: {evidence}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("replayed", no_wrap=True)
    table.add_column("found", overflow="fold")
    for line in sorted(findings, key=lambda line: tuple(FINDING_COLOURS).index(line.status)):
        table.add_row(escape(line.name), f"[{FINDING_COLOURS[line.status]}]{line.status}[/]", escape(line.detail))
    console.out.print(table)


def print_verdict(candidate: Candidate) -> None:
    """The verdict of one candidate and its reasons, a line each."""
    colour = COLOURS[candidate.verdict]
    console.out.print(f"[{colour}]{candidate.verdict}[/] {escape(candidate.name)}: {candidate.kib_per_token:.3f} KiB/token")
    for reason in candidate.reasons[:REASONS_SHOWN]:
        console.out.print(f"  {escape(reason)}", soft_wrap=True)
    if len(candidate.reasons) > REASONS_SHOWN:
        console.out.print(f"  and {len(candidate.reasons) - REASONS_SHOWN} more in summary.json")


def print_promotion(candidates: Sequence[Candidate], move: Move) -> None:
    """Which engine serves now, and why each other one does not."""
    print_comparison(candidates)
    console.out.print(f"[green]Champion:[/] {move.message}")
    champion = next((c for c in candidates if c.name == move.champion), None)
    for candidate in candidates:
        if candidate is champion:
            continue
        if candidate.verdict == PASS and champion is not None:
            why = f"passed, but {_behind(candidate, champion)}"
        else:
            why = f"{candidate.verdict}: {candidate.reasons[0] if candidate.reasons else 'no reason was recorded'}"
        console.out.print(f"  not {escape(candidate.name)}: {escape(why)}", soft_wrap=True)


def _behind(candidate: Candidate, champion: Candidate) -> str:
    """What of promotion.choose decided between two that passed."""
    tokens, most = promotion.live_tokens(candidate), promotion.live_tokens(champion)
    if tokens < most:
        return f"the same memory holds fewer tokens ({tokens:,.0f} against {most:,.0f})"
    if candidate.backend == promotion.ORACLE != champion.backend:
        return "the oracle does not serve where another engine holds as many tokens"
    kl, least = candidate.metric("quality/kl_mean"), champion.metric("quality/kl_mean")
    return f"its mean KL is no lower ({kl:.1e} against {least:.1e}) at as many tokens in the same memory"
