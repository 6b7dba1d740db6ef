"""Tables and sentences at the end of a command, about candidates, capacities and recommendations."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cli import console
from pipeline.cli.console import Column, Grid, Value
from pipeline.evidence.reading import Finding
from pipeline.registry.tracking import Location
from stages.core.memory import GIB
from stages.planning.capacity import Capacity, PolicyCapacity
from stages.planning.recommend import NO_EVIDENCE, NOT_SERVED, Recommendation
from stages.report.exhibit import BASELINE
from stages.verdict.candidate import Candidate, is_blind

MEASURES = (
    (Column("recovery", form=".3f"), "quality/recovery", "1"),
    (Column("KiB/token", ".3f"), "memory/kib_per_token", "baseline/kib_per_token"),
    (Column("PPL\nratio", ".4f"), "quality/ppl_ratio", "1"),
    (Column("mean\nKL", ".1e"), "quality/kl_mean", "0"),
    (Column("top-10\noverlap", ".3f"), "quality/top10_overlap", "1"),
    (Column("right\nanswers", ".3f"), "quality/accuracy_candidate", "quality/accuracy_baseline"),
    (Column("samples\nasked", ".0f"), "quality/samples", ""),
    (Column("decode\ntokens/s", ".0f"), "perf/decode_tokens_per_s", "baseline/decode_tokens_per_s"),
    (Column("CPU of\nothers", ".0%"), "perf/others_share", "baseline/others_share"),
    *(  # tokens per pass under speculative decoding
        (
            Column(f"a pass,\n{drafter}", ".2f"),
            f"quality/acceptance_{drafter}_candidate",
            f"quality/acceptance_{drafter}_baseline",
        )
        for drafter in ("lookup", "draft")
    ),
)
"""(column, candidate's metric, baseline's metric) of the comparison. The third may be the baseline's fixed value.

Columns of speculative decoding are shown only if a candidate has the metric.
"""

FINDING_COLOURS = {"same": "green", "missing": "yellow", "differs": "red"}
COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", BASELINE: "dim"}
POLICY = Column("policy")


def print_comparison(candidates: Sequence[Candidate]) -> None:
    console.say("")
    console.show(comparison(candidates))


def comparison(candidates: Sequence[Candidate]) -> Grid:
    """Return a table with the memory, quality and speed of every engine, baselines first."""
    measured = [
        (column, metric, base)
        for column, metric, base in MEASURES
        if "acceptance" not in metric or any(metric in engine.metrics for engine in candidates)
    ]
    baselines = {candidate.baseline.digest: candidate for candidate in reversed(candidates)}
    rows: list[list[Value]] = []
    for judged in reversed(baselines.values()):
        name = "fp16" if len(baselines) == 1 else f"fp16 of {judged.name}"
        rows.append([name, BASELINE, *(_metric_of(judged, base) for *_, base in measured)])
    for judged in candidates:
        rows.append([judged.name, judged.verdict, *(_metric_of(judged, metric) for _, metric, _ in measured)])
    columns = (POLICY, Column("verdict"), *(column for column, *_ in measured))
    return Grid("KV caches against the FP16-KV engine, on the decode path", columns, rows, COLOURS)


def _metric_of(candidate: Candidate, name: str) -> Value:
    return candidate.metrics.get(name) if "/" in name else name


def findings_grid(policy: str, model: str, directory: Path, findings: Sequence[Finding]) -> Grid:
    """Return a table of the findings of a replay, one row per finding, with differences last."""
    ordered = sorted(findings, key=lambda finding: tuple(FINDING_COLOURS).index(finding.status))
    columns = list(map(Column, ("what", "replayed", "found")))
    rows = [[finding.name, finding.status, finding.detail] for finding in ordered]
    return Grid(console.relative(f"{policy} of {model}: {directory}"), columns, rows, FINDING_COLOURS)


def print_registry(location: Location) -> None:
    console.say(f"registry: {location.model_name} at {location}")


def print_verdict(candidate: Candidate, *, quick_check: bool = False) -> None:
    """Print a verdict in a few lines: the decision, recovery, memory and the main reason.

    A PASS is printed with the range that it covers, any other verdict with its first reason. An INCONCLUSIVE quick check is
    printed as QUICK CHECK. The report has all other reasons, conformance and warnings.
    """
    undecided_check = quick_check and candidate.verdict == "INCONCLUSIVE"
    passed = candidate.verdict == "PASS"
    *figures, memory = candidate.figures if undecided_check else _few_questions(candidate) or candidate.figures
    kib, base = (candidate.metrics.get(f"{prefix}kib_per_token") for prefix in ("memory/", "baseline/"))
    saved = f", FP16 {base:.3f}: the same memory holds {base / kib:.2f} times the tokens" if kib and base else ""
    blind = "the answers do not depend on the cache; " if is_blind(candidate.checks) else ""
    first, *more_reasons = candidate.reasons or ("no reason was recorded",)
    lines = [f"  why: {blind}{first}{f' (and {len(more_reasons)} more reasons in the report)' if more_reasons else ''}"]
    if passed:
        lines = [f"  {candidate.caveat}"] if candidate.caveat is not None else []
        lines += [f"  holds {candidate.covered}"] if candidate.covered is not None else []
    if undecided_check:
        lines = ["  a quick check never passes: no request was compared with the reference engine"]
    title = "QUICK CHECK" if undecided_check else candidate.verdict
    headline = console.styled(COLOURS[candidate.verdict], title, f" {candidate.name}: {'; '.join(figures)}")
    console.say(headline, f"  {memory}{saved}", *lines)


def _few_questions(candidate: Candidate) -> list[str]:
    """Return how many samples would decide, and the memory; empty if the verdict is decided or no number is known."""
    needed, samples = candidate.samples_needed, candidate.metrics.get("quality/samples")
    if candidate.verdict != "INCONCLUSIVE" or not needed or samples is None:
        return []
    return [f"{samples:,.0f} samples are too few to decide; ask about {float(f'{needed:.3g}'):,.0f}", *candidate.figures[-1:]]


KIB, MIB = 1024, 1024**2


def budget_lines(capacity: Capacity) -> list[console.Line]:
    """Return lines with the memory and the requests that the tables assume."""
    use, budget = capacity.use, capacity.budget
    mix = ", ".join(f"{context.requests} of {context.tokens:,}" for context in use.contexts)
    gpus = f"{use.tensor_parallel} GPUs of " if use.tensor_parallel > 1 else ""
    heads = f"{capacity.q_heads} query heads, {capacity.kv_heads} KV heads of {capacity.head_dim}"
    lines: list[console.Line] = [
        console.styled("bold", capacity.model, f": {capacity.layers} layers, {heads}"),
        f"{gpus}{budget.gpu / GIB:.4g} GiB, {budget.weights / GIB:.2f} of it for weights and {budget.reserve / GIB:.4g} "
        f"reserved, leave {budget.cache / GIB:.2f} GiB for the cache{' of each' if gpus else ''}; requests are "
        f"admitted to {100 * use.ceiling:g} %",
        f"mix: {mix} tokens; {100 * capacity.block_waste:.2f} % of their pages' slots stay empty; "
        f"{use.concurrency:,} requests at once are needed (capacity.concurrency)",
    ]
    return [*lines, *map(console.note, capacity.notes)]


def policy_line(capacity: Capacity, name: str) -> list[console.Line]:
    """Return a line about the policy `name`: memory of a request, saving, requests that fit; empty if it or FP16 is missing."""
    entries = {entry.name: entry for entry in capacity.policies}
    chosen, base = entries.get(name), entries.get("fp16")
    if chosen is None or base is None:
        return []
    use = capacity.use
    count = sum(context.requests for context in use.contexts)
    each, exact = (entry.mix_bytes / count / GIB for entry in (chosen, base))
    lengths = " or ".join(f"{context.tokens:,}" for context in use.contexts)
    mean = " in the mean" if len(use.contexts) > 1 else ""
    where = " on each GPU" if use.tensor_parallel > 1 else ""
    memory = f"a request of {lengths} tokens takes {each:.3g} GiB{mean}{where}, {exact - each:.3g} less than under FP16"
    fitting = f"{chosen.requests:,} requests fit, under FP16 {base.requests:,}"
    return [console.styled("bold", name, f": {memory}; {fitting}")]


def capacity_table(capacity: Capacity) -> Grid:
    """Return a table of the tokens and requests that fit the budget, with the most requests first.

    Policies with eviction come last, because they forget tokens.
    """
    percent = f"{100 * capacity.use.ceiling:g} %"
    columns: dict[Column, Callable[[PolicyCapacity], float]] = {
        Column("KiB/\ntoken", ".3f"): lambda entry: entry.bytes_per_token / KIB,
        Column("MiB/\nrequest", ".1f"): lambda entry: entry.request_bytes / MIB,
        Column("tokens\nthat fit", ","): lambda entry: entry.tokens_that_fit,
        Column(f"tokens\nat {percent}", ","): lambda entry: entry.tokens_at_ceiling,
        Column(f"requests\nat {percent}", ","): lambda entry: entry.requests,
        Column("their\ntokens", ","): lambda entry: entry.live_tokens,
    }
    ordered = sorted(
        capacity.policies, key=lambda entry: (entry.policy.eviction is not None, -entry.requests, entry.mix_bytes, entry.name)
    )
    rows: list[list[Value]] = [
        [entry.name, *(value(entry) for value in columns.values()), "forgotten" if entry.policy.eviction else "kept"]
        for entry in ordered
    ]
    few = {entry.name: "dim" for entry in capacity.policies if entry.requests < capacity.use.concurrency}
    return Grid("What the memory holds", (POLICY, *columns, Column("old\ntokens")), rows, few)


def recommendation_lines(recommendation: Recommendation, commands: Sequence[str]) -> list[console.Line]:
    """Return lines with the recommended policy, the reasons against the others, and `commands` that judge the unjudged."""
    chosen, passed_over = recommendation.chosen, recommendation.passed_over
    lines: list[console.Line] = [*map(console.note, recommendation.notes)]
    if chosen is None:
        lines.append(console.styled("red", "No policy can be recommended"))
    else:
        why = (
            f"{chosen.live_tokens:,} live tokens in {chosen.requests:,} requests; PASS {chosen.covered} on "
            f"backend={chosen.backend}, so serve at most {chosen.serve_at_most:,} at once"
        )
        lines += [
            console.styled("green", f"Take {chosen.name}", f": {why}"),
            *(f"  {reason}" for reason in chosen.reasons[:1]),
            f"  evidence: {chosen.evidence} (engine {chosen.engine_digest[:12]})",
        ]
    for entry in passed_over:
        if entry.reason not in (NO_EVIDENCE, NOT_SERVED):
            lines.append(f"  not {entry.name} ({entry.live_tokens:,}): {entry.reason}")
    more, unserved = len(recommendation.unjudged), sum(entry.reason == NOT_SERVED for entry in passed_over)
    if more:
        lines.append(f"  {more} that have no evidence and hold {'at least as many' if chosen else 'enough'} live tokens")
    lines += commands
    if unserved:
        lines.append(f"  and {unserved} that the backend does not serve")
    return lines
