"""Capacities and recommendations as tables and sentences."""

from collections.abc import Sequence

from rich.markup import escape

from pipeline.planning.capacity import Capacity
from pipeline.planning.recommend import NO_EVIDENCE, Recommendation
from pipeline.planning.use import GIB
from pipeline.terminal.commands import command_line
from pipeline.terminal.grids import Column, Grid, Row
from pipeline.terminal.progress import duration

KIB, MIB = 1024, 1024**2

MEASURED = "SmolLM2-135M-Instruct on two cores (`make real`)"
MEASURED_PARAMETERS = 134_515_008
FIRST_ROUND_S, ALL_ROUNDS_S = 136.0, 444.0
"""Seconds of one policy and its baseline there (README.md): one that the first round decides, and one that all five decide."""
BYTES_PER_PARAMETER, BESIDE_GIB = 8, 1.5
"""The engine and the oracle beside it compute in float32; libraries, pages and distributions took the rest of 2.6 GiB there."""


def verdict_lines(parameters: int) -> list[str]:
    """Say what a verdict on a model takes, and what that rests on."""
    times = parameters / MEASURED_PARAMETERS
    if times < 0.1:  # what does not grow with the parameters takes longer
        return []
    memory = BYTES_PER_PARAMETER * parameters / GIB + BESIDE_GIB
    return [
        f"a verdict on a CPU (backend=onnxruntime) takes about {memory:.3g} GiB of memory, and "
        f"{duration(times * FIRST_ROUND_S)} where the first round decides, {duration(times * ALL_ROUNDS_S)} where all five are "
        "asked",
        f"  estimated from {MEASURED}: time and memory grow with the parameters, here {parameters / 1e9:.3g} billion",
    ]


def budget_lines(capacity: Capacity) -> list[str]:
    """Say of what memory and for which requests the tables are."""
    use, budget = capacity.use, capacity.budget
    mix = ", ".join(f"{context.requests} of {context.tokens:,}" for context in use.contexts)
    gpus = f"{use.tensor_parallel} GPUs of " if use.tensor_parallel > 1 else ""
    lines = [
        f"[bold]{escape(capacity.model)}[/]: {capacity.layers} layers, {capacity.q_heads} query heads, {capacity.kv_heads} KV "
        f"heads of {capacity.head_dim}",
        f"{gpus}{budget.gpu / GIB:.4g} GiB, {budget.weights / GIB:.2f} of it for weights and {budget.reserve / GIB:.4g} "
        f"reserved, leave {capacity.cache_bytes / GIB:.2f} GiB for the cache{' of each' if gpus else ''}; requests are "
        f"admitted to {100 * use.ceiling:g} %",
        f"mix: {mix} tokens; {100 * capacity.block_waste:.2f} % of their pages' tokens hold nothing; "
        f"{use.concurrency:,} requests at once are asked",
    ]
    return lines + [f"[yellow]note:[/] {escape(note)}" for note in capacity.notes]


def policy_line(capacity: Capacity, name: str) -> list[str]:
    """Say what a request takes under one policy, what that saves, and how many of the mix fit; nothing where it is unfit."""
    entries = {entry.name: entry for entry in capacity.policies}
    own, base = entries.get(name), entries.get("fp16")
    if own is None or base is None:
        return []
    use, count = capacity.use, sum(context.requests for context in capacity.use.contexts)
    each, exact = (entry.mix_bytes / count / GIB for entry in (own, base))
    lengths = " or ".join(f"{context.tokens:,}" for context in use.contexts)
    mean, where = (" in the mean" if len(use.contexts) > 1 else ""), (" on each GPU" if use.tensor_parallel > 1 else "")
    return [
        f"[bold]{escape(name)}[/]: a request of {lengths} tokens takes {each:.3g} GiB{mean}{where}, {exact - each:.3g} less "
        f"than under FP16; {own.requests:,} requests fit, under FP16 {base.requests:,}"
    ]


def capacity_table(capacity: Capacity) -> Grid:
    """Return what the budget holds under each policy."""
    percent = f"{100 * capacity.use.ceiling:g} %"
    columns = (
        Column("kib_per_token", "KiB/\ntoken", ".3f"),
        Column("mib_per_request", "MiB/\nrequest", ".1f"),
        Column("tokens_that_fit", "tokens\nthat fit", ","),
        Column("tokens_at_ceiling", f"tokens\nat {percent}", ","),
        Column("requests", f"requests\nat {percent}", ","),
        Column("live_tokens", "their\ntokens", ","),
    )
    rows = [
        Row(
            entry.name,
            (
                entry.bytes_per_token / KIB,
                entry.request_bytes / MIB,
                entry.tokens_that_fit,
                entry.tokens_at_ceiling,
                entry.requests,
                entry.live_tokens,
            ),
            style="" if entry.requests >= capacity.use.concurrency else "dim",
        )
        for entry in capacity.policies
    ]
    return Grid("What the memory holds", "policy", columns, rows)


def recommendation_lines(recommendation: Recommendation, base: Sequence[str]) -> list[str]:
    """Say which policy to take and why not the others.

    Of those without evidence, only policies that would hold as much as the chosen one are named; one command judges them all.

    Args:
        recommendation: What was found.
        base: Arguments that the command for missing evidence begins with.
    """
    chosen = recommendation.chosen
    lines = [f"[yellow]note:[/] {escape(note)}" for note in recommendation.notes]
    if chosen is None:
        lines.append("[red]No policy can be recommended[/]")
    else:
        lines.append(
            f"[green]Take {escape(chosen.name)}[/]: {chosen.live_tokens:,} live tokens in {chosen.requests:,} requests; PASS "
            f"{chosen.covered} on backend={chosen.backend}, so serve at most {chosen.serve_at_most:,} at once"
        )
        lines += [f"  {escape(reason)}" for reason in chosen.reasons[:1]]
        lines.append(f"  evidence: {chosen.evidence} (engine {chosen.engine_digest[:12]})")
    least = 0 if chosen is None else chosen.live_tokens
    unjudged = [one for one in recommendation.passed_over if one.reason == NO_EVIDENCE]
    more = [one for one in unjudged if one.live_tokens >= least]
    for one in (one for one in recommendation.passed_over if one not in unjudged):
        lines.append(f"  not {escape(one.name)} ({one.live_tokens:,}): {escape(one.reason)}")
    if more:
        lines.append(f"  {NO_EVIDENCE}: {escape(', '.join(f'{one.name} ({one.live_tokens:,})' for one in more))}; make it with")
        shipped = ",".join(one.name for one in more if " " not in one.name)  # others are changed on the command line
        lines.append(f"    {escape(command_line(base, ['stage=evaluate', f'kv={shipped}'], sweep=',' in shipped))}")
    if len(more) < len(unjudged):
        lines.append(f"  and {len(unjudged) - len(more)} without evidence that would hold fewer live tokens")
    return lines
