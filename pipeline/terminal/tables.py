"""The tables and sentences that a run prints at its end."""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import cast

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from pipeline.artifacts.hardware import hardware
from pipeline.registry import promotion
from pipeline.registry.promotion import Move
from pipeline.registry.proof import PASS, Finding
from pipeline.registry.summary import Candidate
from pipeline.registry.tracking import Location, compare_url, run_url, server_command
from pipeline.terminal import console
from pipeline.verdict.report import EvaluationReport
from pipeline.verdict.thresholds import Verdict

COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("PPL\nratio", "quality/ppl_ratio", "1", ".4f"),
    ("mean\nKL", "quality/kl_mean", "0", ".1e"),
    ("top-10\noverlap", "quality/top10_overlap", "1", ".3f"),
    ("right\nanswers", "quality/accuracy_candidate", "quality/accuracy_baseline", ".3f"),
    ("samples\nasked", "quality/samples", "", ".0f"),
    ("decode\ntokens/s", "perf/decode_tokens_per_s", "baseline/decode_tokens_per_s", ".0f"),
)
"""Heading, the candidate's metric, the baseline's metric (or its value by definition), format."""

DRAFTED: tuple[tuple[str, str, str, str], ...] = (
    ("a pass,\nlookup", "quality/acceptance_lookup_candidate", "quality/acceptance_lookup_baseline", ".2f"),
    ("a pass,\ndraft", "quality/acceptance_draft_candidate", "quality/acceptance_draft_baseline", ".2f"),
)
"""Tokens a pass under speculative decoding, as columns where they were measured."""

REPORT = "report.txt"
"""In the work directory: the tables of the last sweep or promotion."""

DIFFICULTIES = ("easy", "medium", "hard")
REASONS_SHOWN = 5

FINDING_COLOURS = {"same": "green", "missing": "yellow", "differs": "red"}
COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def print_occasion() -> None:
    """Print the day and the machine, without which a table of times says nothing."""
    machine = hardware()
    gpus = ", ".join(str(gpu.get("name", gpu)) for gpu in cast(list[dict[str, str]], machine["gpus"])) or "no GPU"
    console.out.print(f"\n{date.today().isoformat()}, {machine['cpu']}, {machine['cores']} cores, {gpus}")


def print_comparison(candidates: Sequence[Candidate]) -> None:
    """Print a row for each engine: what it costs, what it loses, how fast it is; baselines come first."""
    title = "KV caches against the FP16-KV engine, on the decode path"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    columns = (*COLUMNS, *(column for column in DRAFTED if any(column[1] in engine.metrics for engine in candidates)))
    for heading in ("KiB/token", *(heading for heading, _, _, _ in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    baselines = {candidate.baseline.digest: candidate for candidate in reversed(candidates)}
    for judged in reversed(baselines.values()):
        metrics, name = judged.metrics, "fp16" if len(baselines) == 1 else f"fp16 of {judged.name}"
        cells = [_cell(metrics.get(column), form) if "/" in column else column for _, _, column, form in columns]
        table.add_row(name, "baseline", _cell(metrics.get("baseline/kib_per_token"), ".3f"), *cells, style="dim")
    for engine in candidates:
        colour = COLOURS[engine.verdict]
        cells = [_cell(engine.metrics.get(metric), form) for _, metric, _, form in columns]
        table.add_row(
            engine.name, f"[{colour}]{engine.verdict}[/]", _cell(engine.metrics.get("memory/kib_per_token"), ".3f"), *cells
        )
    console.out.print()
    console.out.print(table)


def print_baseline_accuracy(candidates: Sequence[Candidate]) -> None:
    """Print how often each FP16-KV engine was right, by workload and difficulty; nothing where no workload has difficulties.

    What a baseline gets wrong a candidate cannot lose: a workload near 0 judges nothing, one near 1 only gross faults.
    """
    baselines = {candidate.baseline.digest: candidate for candidate in reversed(candidates)}
    for judged in reversed(baselines.values()):
        shares = {name: value for name, value in judged.metrics.items() if name.endswith("/accuracy_baseline")}
        parts_of = [name.split("/") for name in shares]  # quality/[workload/[difficulty/]]accuracy_baseline
        graded = {parts[1] for parts in parts_of if len(parts) == 4 and parts[2] in DIFFICULTIES}
        if not graded:
            continue
        of = "" if len(baselines) == 1 else f" of {judged.name}"
        table = Table(title=f"Right answers of the FP16-KV engine{of}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("workload", no_wrap=True)
        for heading in ("samples", "all", *DIFFICULTIES):
            table.add_column(heading, justify="right", no_wrap=True)
        for workload in sorted(graded):
            parts = [workload, *(f"{workload}/{difficulty}" for difficulty in DIFFICULTIES)]
            cells = [_cell(shares.get(f"quality/{part}/accuracy_baseline"), ".3f") for part in parts]
            table.add_row(escape(workload), _cell(judged.metrics.get(f"quality/{workload}/accuracy_judged"), ".0f"), *cells)
        console.out.print(table)


def print_findings(policy: str, model: str, directory: Path, findings: Sequence[Finding]) -> None:
    """Print the findings of a replay of the evidence in a directory, a line each; those that differ come last."""
    console.out.print(f"[bold]{escape(policy)}[/] of {escape(model)}: {directory}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("replayed", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in sorted(findings, key=lambda finding: tuple(FINDING_COLOURS).index(finding.status)):
        status = f"[{FINDING_COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(escape(finding.name), status, escape(finding.detail))
    console.out.print(table)


def print_verdict(candidate: Candidate) -> None:
    """Print the verdict of one candidate and its reasons, a line each."""
    colour = COLOURS[candidate.verdict]
    kib_per_token = candidate.metrics.get("memory/kib_per_token")
    memory = "memory unknown" if kib_per_token is None else f"{kib_per_token:.3f} KiB/token"
    held = f" {candidate.covered}" if candidate.covered is not None else ""
    console.out.print(f"[{colour}]{candidate.verdict}[/]{held} {escape(candidate.name)}: {memory}")
    for reason in candidate.reasons[:REASONS_SHOWN]:
        console.out.print(f"  {escape(reason)}", soft_wrap=True)
    if len(candidate.reasons) > REASONS_SHOWN:
        console.out.print(f"  and {len(candidate.reasons) - REASONS_SHOWN} more in summary.json")


def print_conformance(verdict: Verdict) -> None:
    """Print a line for each engine that was compared with the oracle: whether it computes its policy, or where not."""
    for check in verdict.checks:
        if check.gate == "conformance":
            console.out.print(f"  [{COLOURS[check.status]}]{escape(check.reason)}[/]", soft_wrap=True)


def print_evidence(report: EvaluationReport, verdict: Verdict) -> None:
    """Print what the distances are with their errors, what the evaluation could have told, and what was not shown."""
    divergence = report.overall.fidelity.divergence
    for line in divergence.lines if divergence is not None else ():
        console.out.print(f"  {escape(line)}", soft_wrap=True)
    if report.served is not None:
        console.out.print(f"  not seen: {escape('; '.join(report.served.unseen))}", soft_wrap=True)
    for workload, detectable in verdict.detectable.items():
        console.out.print(f"  {escape(workload)}: so many samples can tell that {detectable.text}", soft_wrap=True)
    for warning in verdict.warnings:
        console.out.print(f"  [yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def print_promotion(candidates: Sequence[Candidate], move: Move) -> None:
    """Print which engine serves now, and why each of the others does not."""
    print_comparison(candidates)
    console.out.print(f"[green]Champion:[/] {move.message}")
    champion = next((c for c in candidates if c.name == move.champion), None)
    for candidate in candidates:
        if candidate is champion:
            continue
        if candidate.verdict == PASS and champion is not None:
            reason = f"passed, but {_disadvantage(candidate, champion)}"
        else:
            reason = f"{candidate.verdict}: {candidate.reasons[0] if candidate.reasons else 'no reason was recorded'}"
        console.out.print(f"  not {escape(candidate.name)}: {escape(reason)}", soft_wrap=True)


def _disadvantage(candidate: Candidate, champion: Candidate) -> str:
    """Say by which criterion `promotion.choose` preferred the champion over another candidate that passed."""
    tokens, most = promotion.live_tokens(candidate), promotion.live_tokens(champion)
    if tokens < most:
        return f"the same memory holds fewer tokens ({tokens:,.0f} against {most:,.0f})"
    if candidate.backend == promotion.ORACLE != champion.backend:
        return "the oracle does not serve where another engine holds as many tokens"
    kl, least = candidate.metric("quality/kl_mean"), champion.metric("quality/kl_mean")
    return f"its mean KL is no lower ({kl:.1e} against {least:.1e}) at as many tokens in the same memory"


def print_mlflow(location: Location, experiment_id: str, candidates: Sequence[Candidate], view: str) -> None:
    """Print how to compare the candidates in MLflow by a saved view, or how to look at the only one."""
    run_ids = [candidate.registration.run_id for candidate in candidates if candidate.registration is not None]
    command = server_command(location)
    alone = len(run_ids) == 1
    console.out.print(f"\n{'The run' if alone else 'Compare the candidates'} in MLflow:")
    if command is not None:
        console.out.print(f"  {command}", soft_wrap=True)
    address = run_url(location, experiment_id, run_ids[0]) if alone else compare_url(location, experiment_id, view)
    console.out.print(f"  {address}", soft_wrap=True)
