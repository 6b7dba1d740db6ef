"""Rendering of the reports as docs/numerics.md."""

from collections.abc import Sequence

from benchmarks.numerics.explanations import DISAGREEMENTS
from benchmarks.numerics.report import Claim, Report, Reports, Section

INTRODUCTION = """\
# What the literature says of quantized KV caches, measured here

Each claim is checked in the oracle's one-pass forced decode, where every scored token reads the quantized cache, on two
models: the **tiny model** that ships with kvgate (1.1 M parameters, four layers, planted outlier channels in its keys) on
generated text, and **SmolLM2-135M-Instruct** (30 layers, 3 KV heads of 64 channels, nothing planted) on Python's
documentation. Both are far from the published models, so it is the *kind* of result that is reproduced, never the number.
Where the two disagree, the real model is the one to believe, and a paragraph says why.

- **mean KL**: nats per scored token, against the same model with an FP16 cache. **PPL ratio**: perplexity of prose over
  that of the FP16 cache. **answers**: share of questions that greedy decoding answers exactly (forced argmax).
- Brackets are 95 % intervals of a bootstrap by document. A claim "A is better than B" is judged by how many times the mean KL
  of A that of B is: it HOLDS when the whole interval is above 1, DOES NOT HOLD when it is below, and is UNDECIDED in
  between. Beside it stands the typical text (geometric mean of the paired ratios), since a few tokens can make up most of
  a mean KL.
- The tiny model's **natural** variant is the same function with the planted channels taken out, exactly
  (stages/tiny/checkpoint/README.md). What depends on them is by design, and its column shows it.
"""


def markdown(reports: Reports) -> str:
    """Render the reports as docs/numerics.md has it."""
    present = [report for report in (reports.tiny, reports.smollm2) if report is not None]
    lines = [INTRODUCTION, *(_run(report) for report in present), ""]
    lines += ["## In short", *_in_short(present), ""]
    if disagreeing := disagreements(reports):
        lines += ["## Where the two models disagree"]
        lines += [f"- **{claim.statement}.** {DISAGREEMENTS.get(claim.id, '')}" for claim in disagreeing]
        lines += [""]
    for sections in zip(*(report.sections for report in present), strict=True):
        lines += _section(sections, [report.header.title for report in present])
    return "\n".join(lines)


def disagreements(reports: Reports) -> list[Claim]:
    """Return the tiny model's claims on which SmolLM2's verdict is another one."""
    if reports.tiny is None or reports.smollm2 is None:
        return []
    real = reports.smollm2.claims
    return [claim for claim in reports.tiny.claims.values() if claim.id in real and real[claim.id].verdict != claim.verdict]


def _run(report: Report) -> str:
    header = report.header
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    return (
        f"- {header.title}: `{header.command}`, {header.date}, {header.seconds:,} s of {header.machine}; {versions}; "
        f"checkpoint sha256 {header.checkpoint[:16]}; {header.texts}."
    )


def _in_short(reports: Sequence[Report]) -> list[str]:
    columns = ["claim", "published"]
    for report in reports:
        columns += [report.header.title, "verdict"]
    claims = {name: claim for report in reversed(reports) for name, claim in report.claims.items()}
    order = dict.fromkeys(name for report in reports for name in report.claims)
    rows = []
    for name in order:
        row = [claims[name].statement, claims[name].published]
        for report in reports:
            claim = report.claims.get(name)
            row += ["–", "–"] if claim is None else [claim.ours, f"**{claim.verdict}**"]
        rows.append(tuple(row))
    return _table(tuple(columns), rows)


def _section(sections: Sequence[Section], titles: Sequence[str]) -> list[str]:
    lines = [f"## {sections[0].title}"]
    common = len({section.intro for section in sections}) == 1
    lines += [sections[0].intro, ""] if common else []
    lines += [f"Measured apart: {'; '.join(apart)}.", ""] if (apart := [s.measured for s in sections if s.measured]) else []
    # A table of no model's own, such as that of random tensors, is shown once.
    shared = len({section.rows for section in sections}) == 1
    for section, title in zip(sections, titles, strict=True):
        if not (shared and section is not sections[0]):
            lines += [] if shared else [f"**{title}**" + ("" if common else f": {section.intro}"), ""]
            lines += [*_table(section.columns, section.rows), ""]
            lines += [section.notes, ""] if section.notes else []
    for section, title in zip(sections, titles, strict=True):
        explained = [claim for claim in section.claims if claim.why]
        lines += [f"- {title}, **{c.verdict}**: {c.statement}: {c.ours}. {c.why}" for c in explained]
    lines += [""] if any(claim.why for section in sections for claim in section.claims) else []
    return lines


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    marks = ("---",) + ("---:",) * (len(columns) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (columns, marks, *rows)]
